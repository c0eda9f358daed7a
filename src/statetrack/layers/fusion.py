"""When a layer may compute with a module's weights instead of calling the module.

On a GPU every kernel launch costs time, so layers join matrix products that read the same input and fuse what
follows them. To do so they read `linear.weight` and skip `linear.forward`. That is correct only while
`forward` would do nothing else: a LoRA wrapper, a forward hook, a parametrised or quantised weight must take
effect. So layers read weights only from modules that `may_read` accepts, and call every other module.

Fusion is on for tensors on a GPU. `fused(False)` turns it off everywhere, `fused(True)` also takes the fused
path on a CPU (for tests). STATETRACK_FUSION=0 or 1 in the environment does the same for a whole process.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from statetrack.errors import unknown_name
from statetrack.layers.joined_weights import Joined, lie_in_a_row

CHOICES = {"auto": None, "0": False, "1": True}
WEIGHT_TYPES = (nn.Parameter, Tensor)
BIAS_TYPES = (type(None), nn.Parameter, Tensor)
COLUMNS = 8  # a joined product has a multiple of these: tensor cores need rows of halves aligned to 16 bytes
RECOMPUTE_FROM = 2**26  # bytes: smaller tensors are not worth another kernel


def _from_environment() -> bool | None:
    value = os.environ.get("STATETRACK_FUSION", "auto")
    if value not in CHOICES:
        raise unknown_name("STATETRACK_FUSION", value, CHOICES)
    return CHOICES[value]


# True: fuse everywhere; False: nowhere; None: on a GPU. Not a ContextVar: a checkpointed block repeats its
# forward in a thread of autograd, which must take the same path.
_choice: bool | None = _from_environment()


@contextmanager
def fused(choice: bool | None) -> Iterator[None]:
    """Inside a `with` block, turn fusion off (False), on for a CPU as well (True), or on for a GPU (None)."""
    global _choice
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before


def fuses(x: Tensor) -> bool:
    """Whether layers take their fused path for x, where their modules allow it."""
    return x.is_cuda if _choice is None else _choice


def recomputes(x: Tensor) -> bool:
    """Whether what is cheap to compute from x is computed again in the backward pass instead of kept."""
    return x.numel() * x.element_size() >= RECOMPUTE_FROM


def may_read(kind: type[nn.Module], *modules: nn.Module) -> bool:
    """Whether to compute with the weights of these modules: each is a plain `kind`, and fusion is not off."""
    if _choice is False:
        return False
    for module in modules:
        if not is_plain(kind, module):
            return False
    return not (
        torch_modules._global_forward_pre_hooks
        or torch_modules._global_forward_hooks
        or torch_modules._global_backward_pre_hooks
        or torch_modules._global_backward_hooks
    )


def is_plain(kind: type[nn.Module], module: nn.Module) -> bool:
    """Whether `module` computes what a `kind` with ordinary weights computes, and nothing else.

    A subclass is not plain, and so neither is a parametrised module, whose class PyTorch replaces. Nor is one
    with hooks (weight_norm and pruning work by hooks), with a `forward` set on the instance, or with weights
    that are a subclass of Tensor (quantised, distributed). `torch.func.functional_call` may put ordinary
    tensors in the place of parameters.
    """
    if type(module) is not kind:
        return False
    attributes = module.__dict__
    parameters = attributes["_parameters"]
    return not (
        attributes["_forward_pre_hooks"]
        or attributes["_forward_hooks"]
        or attributes["_backward_pre_hooks"]
        or attributes["_backward_hooks"]
        or "forward" in attributes
        or type(parameters.get("weight")) not in WEIGHT_TYPES
        or type(parameters.get("bias")) not in BIAS_TYPES
    )


def joins(x: Tensor, *linears: nn.Module) -> bool:
    """Whether `joined_product` may stand for calling each of the linear maps on x."""
    if not (fuses(x) and may_read(nn.Linear, *linears)):
        return False
    return all(linear._parameters["bias"] is None for linear in linears)


def joined_product(x: Tensor, linears: Sequence[nn.Linear]) -> Tensor:
    """The outputs of several linear maps without bias side by side, from one matrix product.

    The number of columns is rounded up to a multiple of COLUMNS; those past the maps' own hold no result.
    """
    weights = [linear.weight for linear in linears]
    rows = [len(weight) for weight in weights]
    missing, longest = -sum(rows) % COLUMNS, weights[rows.index(max(rows))].detach()
    while missing > 0:
        weights.append(longest[:missing])
        missing -= len(weights[-1])
    joined = Joined.apply(*weights) if lie_in_a_row(weights) else torch.cat(weights)
    return F.linear(x, joined)
