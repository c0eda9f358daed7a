"""The mLSTM in chunks: parallel within a chunk, with the state carried from one to the next."""

import torch
from torch import Tensor

from statetrack.ops.checks import can_look
from statetrack.ops.mlstm.as_attention import mlstm_as_attention
from statetrack.ops.mlstm.reference import MLSTMCell, fresh_cell, log_forget, mlstm_reference, normaliser

CHUNK = 64


def mlstm_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: MLSTMCell | None = None,
    signed: bool = False,
) -> tuple[Tensor, MLSTMCell]:
    """Same arguments and results as `mlstm_reference`; a sequence of up to CHUNK steps has no loop at all.

    With F the sum of log sigmoid(f) from the chunk's start and (C0, n0, m0) the state that enters,

        log D_ts = F_t - F_s + i_s  (s <= t)        m_t = max(max_s log D_ts, F_t + m0)
        A = Q K^T / sqrt(K) o exp(log D - m_t)      e_t = exp(F_t + m0 - m_t)
        h = (A V + e Q C0) / max(|A 1 + e Q n0|, exp(-m))

    With `signed` gates there are no logarithms of the gates to sum: see `mlstm_as_attention`. Where numbers
    can be read for free, on a CPU, a call with NaN or infinity is repeated step by step: it would spread to
    earlier steps of its chunk, since the zeros above the diagonal of A meet it. Closed gates, of f = -1e6 to
    -inf, count as -1e6, so that differences of F keep their digits.
    """
    h, last = _in_chunks(q, k, v, i, f, state, signed)
    return mlstm_reference(q, k, v, i, f, state) if not signed and is_bad(last) else (h, last)


def is_bad(last: MLSTMCell) -> bool:
    """Whether NaN or infinity is seen in the last memory, where a bad k, v or gate stays."""
    return can_look(last.C) and not bool(last.C.detach().sum().isfinite())


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: MLSTMCell | None, signed: bool
) -> tuple[Tensor, MLSTMCell]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v, i, f = (x.to(dtype) for x in (q, k, v, i, f))
    if q.shape[1] == 0:
        return torch.zeros_like(v), fresh_cell(q, v) if state is None else state
    if signed:
        return mlstm_as_attention(q, k, v, i, f, state, signed=True)
    k = k * k.shape[-1] ** -0.5
    # heads before time inside: (B, H, T, K) and (B, H, T)
    inputs = [x.transpose(1, 2) for x in (q, k, v, i, log_forget(f))]
    outputs = []
    for q, k, v, i, log_f in zip(*(x.split(CHUNK, dim=2) for x in inputs), strict=True):
        h, state = _chunk(q, k, v, i, log_f, state)
        outputs.append(h)
    assert state is not None
    return torch.cat(outputs, dim=2).transpose(1, 2), state


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, log_f: Tensor, state: MLSTMCell | None
) -> tuple[Tensor, MLSTMCell]:
    # In float64: where forget gates close, F is in the thousands or millions, and its differences of order 1.
    # No tighter bound on log f would do, as an open input gate exp(i) can outweigh any decay.
    F_t, i = log_f.double().cumsum(-1), i.double()
    C = q.shape[2]
    future = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
    log_D = F_t[..., :, None] + (i - F_t)[..., None, :]
    log_D = log_D.masked_fill(future, -float("inf"))
    m = log_D.amax(-1)
    if state is not None:
        m = torch.maximum(m, F_t + state.m[..., None])
    D = torch.exp((log_D - m[..., None]).to(q.dtype))
    A = q @ k.mT * D
    read, nq = A @ v, A.sum(-1)
    # the last row of D is how much of each step is left at the chunk's end
    left = k * D[..., -1, :, None]
    C_end, n_end = left.mT @ v, left.sum(-2)
    if state is not None:
        e = torch.exp((F_t + state.m[..., None] - m).to(q.dtype))
        read = read + e[..., None] * (q @ state.C)
        nq = nq + e * (q @ state.n[..., None]).squeeze(-1)
        C_end = C_end + e[..., -1, None, None] * state.C
        n_end = n_end + e[..., -1, None] * state.n
    m = m.to(q.dtype)
    return read / normaliser(nq, m)[..., None], MLSTMCell(C_end, n_end, m[..., -1])
