"""The delta rule on convolved inputs as one op after the other: the definition."""

from torch import Tensor

from statetrack.ops.convolved_delta_rule.shapes import Shapes
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.short_convolution import convolved_split


def convolved_delta_rule_reference(
    x: Tensor,
    weights: list[Tensor],
    shapes: Shapes,
    silu: list[bool],
    beta: tuple[float, bool],
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor | None]:
    """delta_rule(*convolved_split(x)) with q and k divided by their norms. Shapes: see `Shapes`.

    `beta` holds the rule's options `beta_from_logits` and `hard_beta`.
    """
    packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
    parts = convolved_split(x, tuple(shapes.widths), weights, silu=tuple(silu), **packing)
    return delta_rule(
        *shapes.split_heads(*parts),
        beta_from_logits=beta[0],
        hard_beta=beta[1],
        householders=shapes.householders,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=True,
        **packing,
    )
