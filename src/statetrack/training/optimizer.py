"""AdamW with the paper's parameter groups, and the learning-rate schedule."""

import math

import torch
from torch import Tensor, nn

from statetrack.spec import TrainingConfig


def decayed_names(model: nn.Module) -> frozenset[str]:
    """The names of the weight matrices, which AdamW decays: not norms, biases, embeddings, A_log or D.

    A tied head is the embedding's table, under its name, and so is not decayed either.
    Names outlive what parameters do not: `fully_shard` puts new ones in their place, without our marks.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return frozenset(
        name
        for name, p in model.named_parameters()
        if p.ndim >= 2 and id(p) not in embeddings and not getattr(p, "no_weight_decay", False)
    )


def make_optimizer(model: nn.Module, config: TrainingConfig, decayed: frozenset[str]) -> torch.optim.AdamW:
    """AdamW that decays the parameters named in `decayed` (see `decayed_names`) and no others.

    One kernel for all weights, and the rate a tensor beside them, so that a step never waits for the host.
    """
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if name in decayed], "weight_decay": config.weight_decay},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]
    betas, device = (config.beta1, config.beta2), named[0][1].device
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=torch.tensor(config.lr, device=device),
        betas=betas,
        eps=config.eps,
        fused=True,
        capturable=device.type == "cuda",
    )


@torch.no_grad()
def begin_stage(optimizer: torch.optim.Optimizer, step: int, config: TrainingConfig) -> None:
    """Before the first step behind the short sequences of a curriculum: begin the optimiser anew, in place.

    Gradients of longer sequences are far above those that the short ones ended with. Divided by the root mean
    square of the latter they would move the weights several times too far.
    """
    if 0 < step == config.short_steps:
        for moments in optimizer.state.values():
            for x in moments.values():
                x.zero_()


def learning_rates(config: TrainingConfig) -> Tensor:
    """The rate of every step, (steps,)."""
    return torch.tensor([learning_rate(step, config) for step in range(config.steps)])


def learning_rate(step: int, config: TrainingConfig) -> float:
    """The rate of step 0, 1, ...: linear from lr / warm-up steps, then constant or a cosine to `final_lr`.

    The short sequences of a curriculum have a schedule of their own, and so have the steps behind them.
    """
    steps, short = config.steps, min(config.short_steps, config.steps)
    step, steps = (step, short) if step < short else (step - short, steps - short)
    warmup = round(config.warmup * steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    progress = (step - warmup) / max(1, steps - warmup)
    return config.final_lr + (config.lr - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
