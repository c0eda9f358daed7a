"""Embedding of tokens; the gradient of the table is summed in a fixed order, so that results repeat."""

import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import load, no_triton, pick_backend

BACKENDS = {
    "reference": "statetrack.ops.embedding.reference:embedding_reference",
    "triton": "statetrack.ops.embedding.triton.backend:embedding_triton",
}


def _triton_refuses(tokens: Tensor, weight: Tensor) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    return no_triton(weight) or load("statetrack.ops.embedding.triton.backend:refuses")(tokens, weight)


def embedding(tokens: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """weight[tokens]. Shapes: tokens (...), integers below v; weight (v, d); result (..., d)."""
    op = "embedding"
    checks.require_tensors(op, tokens=tokens, weight=weight)
    if weight.ndim != 2:
        raise UserError(f"{op}: weight has shape {tuple(weight.shape)}, expected (vocabulary, width).")
    checks.check_floating(op, tokens.device, weight=weight)
    if tokens.is_floating_point():
        raise UserError(f"{op}: tokens are {tokens.dtype}, expected whole numbers.")
    refusals = {"triton": lambda: _triton_refuses(tokens, weight)}
    run = pick_backend(op, backend, weight.device, BACKENDS, refusals)
    if torch.compiler.is_compiling():
        return run(tokens, weight)
    try:
        return run(tokens, weight)
    except IndexError as error:  # on a CPU; a GPU would have to be waited for
        raise UserError(
            f"{op}: tokens lie between {int(tokens.min())} and {int(tokens.max())}, expected whole numbers "
            f"from 0 to {len(weight) - 1}."
        ) from error


__all__ = ["embedding"]
