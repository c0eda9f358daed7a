"""The mLSTM as one call of gated linear attention."""

import torch
from torch import Tensor

from statetrack.ops.gated_linear_attention import gated_linear_attention
from statetrack.ops.mlstm.reference import MLSTMCell, fresh_cell, log_forget, log_size, normaliser


def mlstm_as_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: MLSTMCell | None,
    signed: bool,
    backend: str = "auto",
) -> tuple[Tensor, MLSTMCell]:
    """As `mlstm_reference`, for at least one step. Divided by exp(m_t), the memory with gates a_t is

        C_t = a_t exp(m_{t-1} - m_t) C_{t-1} + exp(i_t - m_t) k_t v_t^T / sqrt(K)

    with gates of size at most 1 again, and n_t is the same with 1 in the place of v_t: one more column of C.
    The maxima m_t need no loop: with F the sum of log |a|, m_t = F_t + max(m_0, max_{s <= t} i_s - F_s). In
    float64, as F may reach millions. Signed gates a_t = tanh(f_t / 2) are passed by their value, and their
    maxima are constants for the gradient (`log_size`); others, sigmoid(f_t), by their logarithm. `backend` is
    that of gated linear attention.
    """
    before_all = fresh_cell(q, v) if state is None else state
    log_a = log_size(f) if signed else log_forget(f)
    F_t, i_t, m_0 = log_a.double().cumsum(1), i.double(), before_all.m.double()[:, None]
    m = F_t + torch.cat([m_0, i_t - F_t], dim=1).cummax(1).values[:, 1:]
    m = m.detach() if signed else m
    fallen = torch.cat([m_0, m[:, :-1]], dim=1) - m
    a, g = None, None
    if signed:
        a = torch.tanh(f / 2) * torch.exp(fallen).to(f.dtype)
    else:
        g = (log_a + fallen).to(q.dtype)
    m = m.to(q.dtype)
    o, S = gated_linear_attention(
        q,
        (torch.exp(i - m) * k.shape[-1] ** -0.5)[..., None] * k,
        torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1),
        g,
        a=a,
        scale=1.0,
        initial_state=torch.cat([before_all.C, before_all.n[..., None]], dim=-1),
        output_final_state=True,
        backend=backend,
    )
    assert S is not None
    h = o[..., :-1] / normaliser(o[..., -1], m)[..., None]
    return h, MLSTMCell(S[..., :-1], S[..., -1], m[:, -1])
