"""Activation checkpointing: a block keeps its inputs only, and repeats its forward in the backward pass."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint


def recomputed(block: nn.Module, *inputs: Any) -> Any:
    """block(*inputs), its activations computed once more for the gradient instead of kept.

    Inside a `functional_call` the block's weights are other tensors than its own (the copies of
    `HalfWeights`), and its own again by the time of the backward pass: they are handed to the repetition.
    """
    given = {name: p for name, p in block.named_parameters() if type(p) is Tensor}
    # a generator's state cannot be read while a graph is captured; the layers here draw no random numbers
    keep_rng = not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    if given:
        return checkpoint(
            functional_call, block, given, inputs, use_reentrant=False, preserve_rng_state=keep_rng
        )
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=keep_rng)
