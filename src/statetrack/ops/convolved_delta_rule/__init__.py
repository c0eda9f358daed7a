"""The delta rule on the convolved columns of one product, keeping little for the backward pass."""

from collections.abc import Sequence

from torch import Tensor

from statetrack.ops import checks
from statetrack.ops.backends import load, no_triton, pick_backend
from statetrack.ops.convolved_delta_rule.shapes import Shapes

BACKENDS = {
    "reference": "statetrack.ops.convolved_delta_rule.reference:convolved_delta_rule_reference",
    "triton": "statetrack.ops.convolved_delta_rule.triton.backend:convolved_delta_rule_triton",
}


def _triton_refuses(x: Tensor, taps: int, shapes: Shapes) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    backend = "statetrack.ops.convolved_delta_rule.triton.backend:refuses"
    return no_triton(x) or load(backend)(x, taps, shapes)


def convolved_delta_rule(
    x: Tensor,
    weights: Sequence[Tensor],
    heads: int,
    K: int,
    V: int,
    *,
    beta_from_logits: float,
    hard_beta: bool = False,
    householders: int = 1,
    silu: Sequence[bool] = (True, True, True),
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`delta_rule` on q, k and v from `convolved_split` of x = [q, k, v, logits of beta, ...], unit q and k.

    Shapes: x (B, T, N) with columns of widths H K, n H K, n H V and n H, n = `householders`, and any number
    more; three weights (width, taps). Returns the outputs (B, T, H, V) and the last states, as `delta_rule`.

    The Triton backend keeps x and the states of the chunks for the backward pass and computes q, k, v and the
    inverses of the chunks again: half of the memory for a tenth of the recurrence's time.
    """
    shapes = Shapes(heads, K, V, householders)
    if checks.is_checked():  # values are checked between the two ops
        backend = "reference"
    run = pick_backend(
        "convolved_delta_rule",
        backend,
        x.device,
        BACKENDS,
        {"triton": lambda: _triton_refuses(x, weights[0].shape[1], shapes)},
    )
    packing = cu_seqlens, max_seqlen
    beta = beta_from_logits, hard_beta
    return run(x, list(weights), shapes, list(silu), beta, output_final_state, *packing)


__all__ = ["convolved_delta_rule"]
