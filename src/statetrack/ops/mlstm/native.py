"""The native CPU backend of the mLSTM: that of gated linear attention, with one more column for n."""

from torch import Tensor

from statetrack.ops.mlstm.as_attention import mlstm_as_attention
from statetrack.ops.mlstm.chunked import CHUNK, is_bad, mlstm_chunked
from statetrack.ops.mlstm.reference import MLSTMCell, mlstm_reference


def mlstm_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: MLSTMCell | None = None,
    signed: bool = False,
) -> tuple[Tensor, MLSTMCell]:
    """Same arguments and results as `mlstm_reference`, in float32.

    Up to CHUNK steps, where it would gain nothing, it is the chunked form. A call with NaN or infinity is
    repeated step by step, as there.
    """
    if q.shape[1] <= CHUNK:
        return mlstm_chunked(q, k, v, i, f, state, signed)
    q, k, v, i, f = (x.float() for x in (q, k, v, i, f))
    h, last = mlstm_as_attention(q, k, v, i, f, state, signed, backend="native")
    return mlstm_reference(q, k, v, i, f, state) if not signed and is_bad(last) else (h, last)
