"""The mLSTM of q, k and v in one tensor: in plain PyTorch its parts are taken apart."""

from torch import Tensor

from statetrack.ops.mlstm.chunked import mlstm_chunked
from statetrack.ops.mlstm.native import mlstm_native
from statetrack.ops.mlstm.reference import MLSTMCell, mlstm_reference


def mlstm_joined_reference(
    qkv: Tensor, i: Tensor, f: Tensor, state: MLSTMCell | None = None, signed: bool = False
) -> tuple[Tensor, MLSTMCell]:
    """`mlstm_reference` of the parts of qkv (B, T, 3, H, K)."""
    q, k, v = qkv.unbind(2)
    return mlstm_reference(q, k, v, i, f, state, signed)


def mlstm_joined_chunked(
    qkv: Tensor, i: Tensor, f: Tensor, state: MLSTMCell | None = None, signed: bool = False
) -> tuple[Tensor, MLSTMCell]:
    """`mlstm_chunked` of the parts of qkv (B, T, 3, H, K)."""
    q, k, v = qkv.unbind(2)
    return mlstm_chunked(q, k, v, i, f, state, signed)


def mlstm_joined_native(
    qkv: Tensor, i: Tensor, f: Tensor, state: MLSTMCell | None = None, signed: bool = False
) -> tuple[Tensor, MLSTMCell]:
    """`mlstm_native` of the parts of qkv (B, T, 3, H, K)."""
    q, k, v = qkv.unbind(2)
    return mlstm_native(q, k, v, i, f, state, signed)
