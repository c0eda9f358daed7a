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
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear) or type(module.weight) is not nn.Parameter:
                continue  # a parametrised or quantised weight is computed, not stored: autocast casts it
            if id(module.weight) in embedded:
                continue
            if module.weight.dtype == torch.float32:
                copy = module.weight.detach().bfloat16().requires_grad_()
                self.copies[f"{name}.weight"] = self.of[module.weight] = copy

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return functional_call(self.model, self.copies, inputs, options)

    def zero_grad(self) -> None:
        for copy in self.copies.values():
            copy.grad = None
