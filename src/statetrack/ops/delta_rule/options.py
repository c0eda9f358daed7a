"""The options of a call of the delta rule, as every backend receives them."""

from typing import NamedTuple

# m of a hard beta, s clamp((1 + 2 m) sigmoid(x) - m, 0, 1): it reaches 0 and s at logits of -4.6 and 4.6
HARD_BETA_MARGIN = 0.01


class DeltaRuleOptions(NamedTuple):
    """Everything about a call but its tensors. Hashable, and made in half a microsecond, unlike a dataclass.

    Plain numbers in this order, so that `*options` are also the scalar arguments of a `torch.library` op.
    """

    scale: float  # of the outputs; K^-1/2 unless the caller says otherwise
    householders: int = 1  # delta steps per token
    l2norm: bool = False  # divide every q and k by its norm
    beta_from_logits: float | None = None  # s: beta holds logits x and the rule runs with s sigmoid(x)
    max_seqlen: int | None = None  # no packed sequence has more tokens
    output_final_state: bool = True  # a backend may return None for the last states where it is False
    hard_beta: bool = False  # with logits x: s clamp(1.02 sigmoid(x) - 0.01, 0, 1), which reaches 0 and s


# The same as part of a `torch.library` schema.
OPTIONS_SCHEMA = (
    "float scale, int householders, bool l2norm, float? beta_from_logits, int? max_seqlen, "
    "bool output_final_state, bool hard_beta"
)
