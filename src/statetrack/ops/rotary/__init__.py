"""q, k and v of attention from one product, q and k rotated by their positions (Su et al. 2021)."""

import math

from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import load, no_triton, pick_backend
from statetrack.ops.rotary.reference import positions, rotate

BACKENDS = {
    "reference": "statetrack.ops.rotary.reference:rotated_split_reference",
    "triton": "statetrack.ops.rotary.triton.backend:rotated_split_triton",
}


def _triton_refuses(qkv: Tensor) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    return no_triton(qkv) or load("statetrack.ops.rotary.triton.backend:refuses")(qkv)


def rotated_split(
    qkv: Tensor, heads: int, kv_heads: int, base: float, *, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """The heads of q, k and v side by side in qkv; those of q and k rotated, the first step at position 0.

    Shapes: qkv (B, T, (heads + 2 kv_heads) K); q (B, T, heads, K), k and v (B, T, kv_heads, K). Channels
    j and j + K/2 at position t are rotated by the angle t base^(-2j/K), in float32 (float64 stays).
    """
    op = "rotated_split"
    checks.require_tensors(op, qkv=qkv)
    checks.check_floating(op, qkv.device, qkv=qkv)
    groups = heads + 2 * kv_heads
    if qkv.ndim != 3 or min(heads, kv_heads) < 1 or qkv.shape[-1] % (2 * groups):
        raise UserError(
            f"{op}: qkv has shape {tuple(qkv.shape)}, expected (batch, time, n K) with n = {groups} heads, "
            f"{heads} of q and {kv_heads} each of k and v, and an even K: pairs of channels are rotated."
        )
    if not (base > 0 and math.isfinite(base)):
        raise UserError(f"{op}: base is {base}, expected a positive number.")
    run = pick_backend(op, backend, qkv.device, BACKENDS, {"triton": lambda: _triton_refuses(qkv)})
    return run(qkv, heads, kv_heads, base)


__all__ = ["positions", "rotate", "rotated_split"]
