"""AdamW with the paper's parameter groups, and the learning-rate schedule."""

import math

import torch
from torch import Tensor, nn

from statetrack.spec import TrainingConfig


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW that decays weight matrices only: not norms, biases, embeddings, A_log or D.

    One kernel for all weights, and the rate a tensor beside them, so that a step never waits for the host.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decayed, kept = [], []
    for p in model.parameters():
        plain = p.ndim < 2 or id(p) in embeddings or getattr(p, "no_weight_decay", False)
        (kept if plain else decayed).append(p)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    betas, device = (config.beta1, config.beta2), decayed[0].device
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=torch.tensor(config.lr, device=device),
        betas=betas,
        eps=config.eps,
        fused=True,
        capturable=device.type == "cuda",
    )


def learning_rates(config: TrainingConfig) -> Tensor:
    """The rate of every step, (steps,)."""
    return torch.tensor([learning_rate(step, config) for step in range(config.steps)])


def learning_rate(step: int, config: TrainingConfig) -> float:
    """The rate of step 0, 1, ...: linear from lr / warm-up steps, then constant or a cosine to `final_lr`."""
    warmup = round(config.warmup * config.steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.final_lr + (config.lr - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
