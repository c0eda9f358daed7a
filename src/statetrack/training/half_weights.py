"""bfloat16 copies of the weights that linear maps read, for steps under autocast.

Autocast casts every weight in every step, and every gradient back: two small kernels each, a twentieth of a
step at width 128. Here the kernel that updates a weight also writes its copy, and reads the copy's gradient.
The numbers are autocast's own: the same rounding, at another time.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class HalfWeights:
    """The model with its linear maps on bfloat16 copies. Whoever updates a weight must update its copy.

    A weight that several modules share, such as a tied head's, has no copy: the embedding reads it in
    float32, so that its gradient has two parts, and autocast adds them up in float32.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.copies: dict[str, Tensor] = {}  # by name of the weight
        self.of: dict[Tensor, Tensor] = {}  # by the weight itself
        uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear) or type(module.weight) is not nn.Parameter:
                continue  # a parametrised or quantised weight is computed, not stored: autocast casts it
            if module.weight.dtype == torch.float32 and uses[id(module.weight)] == 1:
                copy = module.weight.detach().bfloat16().requires_grad_()
                self.copies[f"{name}.weight"] = self.of[module.weight] = copy

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return functional_call(self.model, self.copies, inputs, options)

    def zero_grad(self) -> None:
        for copy in self.copies.values():
            copy.grad = None
