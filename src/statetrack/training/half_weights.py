"""bfloat16 copies of the weights that linear maps read, for steps under autocast.

Autocast casts every weight in every step, and every gradient back: two small kernels each, a twentieth of a
step at width 128. Here the kernel that updates a weight also writes its copy, and reads the copy's gradient.
The numbers are autocast's own: the same rounding, at another time.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class HalfWeights:
    """The model with its linear maps on bfloat16 copies. Whoever updates a weight must update its copy."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.copies: dict[str, Tensor] = {}  # by name of the weight
        self.of: dict[Tensor, Tensor] = {}  # by the weight itself
        # a tied head: autocast casts it, because the embedding reads the same weight in float32
        embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        weights: dict[str, nn.Parameter] = {}
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear) or type(module.weight) is not nn.Parameter:
                continue  # a parametrised or quantised weight is computed, not stored: autocast casts it
            if id(module.weight) not in embedded and module.weight.dtype == torch.float32:
                weights[f"{name}.weight"] = module.weight
        for (name, weight), copy in zip(weights.items(), _copies(list(weights.values())), strict=True):
            self.copies[name] = self.of[weight] = copy.requires_grad_()

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return functional_call(self.model, self.copies, inputs, options)

    def zero_grad(self) -> None:
        for copy in self.copies.values():
            copy.grad = None


def _copies(weights: list[nn.Parameter]) -> list[Tensor]:
    """bfloat16 copies of the weights, one after the other in one storage.

    Products that layers join then read them where they are (`layers.joined_weights`), without a copy for
    each, which the backward pass would have to keep. Each begins at a multiple of 16 bytes, as tensor cores
    have it.
    """
    if not weights:
        return []
    sizes = [-(-weight.numel() // 8) * 8 for weight in weights]
    places = torch.empty(sum(sizes), dtype=torch.bfloat16, device=weights[0].device).split(sizes)
    copies = []
    for place, weight in zip(places, weights, strict=True):
        copy = place[: weight.numel()].view(weight.shape).detach()
        copies.append(copy.copy_(weight.detach()))
    return copies
