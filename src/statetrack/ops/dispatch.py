"""How an op is reached: through the dispatcher of PyTorch where that is needed, directly elsewhere."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def direct(x: Tensor, function: Callable[..., Any], op: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for a plain tensor, the `torch.library` op around it for torch.compile and fake tensors.

    The dispatcher takes 15 us of a call that is little more than an allocation and a launch.
    """
    plain = type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    return function if plain else op
