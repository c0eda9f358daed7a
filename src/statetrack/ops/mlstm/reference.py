"""The mLSTM recurrence, one step at a time: the definition the other forms are tested against."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6  # added to the normaliser, as in the xlstm package
SMALLEST = 1e-30  # of a signed gate in m: C / exp(m) is multiplied by up to its inverse, which float32 holds


# of the logarithm of a forget gate where logarithms are summed: a lower one, such as -1e30, would cost the
# digits of all that follow. It is still closed for input gates that are less than 1e6 apart.
LOWEST_LOG = -1e6


class MLSTMCell(NamedTuple):
    """The memory C and the normaliser n, both divided by exp(m) so that neither can overflow."""

    C: Tensor  # (B, H, K, V)
    n: Tensor  # (B, H, K)
    m: Tensor  # (B, H), -inf before the first step


def fresh_cell(q: Tensor, v: Tensor) -> MLSTMCell:
    """The state before the first step; q (B, T, H, K) and v (B, T, H, V) give sizes, device and dtype."""
    B, _, H, K = q.shape
    return MLSTMCell(
        q.new_zeros(B, H, K, v.shape[-1]), q.new_zeros(B, H, K), q.new_full((B, H), -float("inf"))
    )


def mlstm_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: MLSTMCell | None = None,
    signed: bool = False,
) -> tuple[Tensor, MLSTMCell]:
    """Run the recurrence of the mLSTM (Beck et al. 2024), with exponential input and sigmoid forget gates.

        C_t = sigmoid(f_t) C_{t-1} + exp(i_t) k_t v_t^T / sqrt(K)
        n_t = sigmoid(f_t) n_{t-1} + exp(i_t) k_t / sqrt(K)
        h_t = C_t^T q_t / max(|n_t . q_t|, 1)

    computed with C and n divided by exp(m_t), m_t = max(log sigmoid(f_t) + m_{t-1}, i_t), which cancels in h.
    Shapes: q, k (B, T, H, K); v (B, T, H, V); i, f (B, T, H), before their exp and sigmoid. With `signed` the
    gate 2 sigmoid(f_t) - 1 = tanh(f_t / 2) is in the place of sigmoid(f_t), and its size in m_t; see
    `log_size`.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v, i, f = (x.to(dtype) for x in (q, k, v, i, f))
    C, n, m = fresh_cell(q, v) if state is None else state
    k = k * k.shape[-1] ** -0.5
    log_f = log_size(f) if signed else F.logsigmoid(f)
    outputs = []
    for t in range(q.shape[1]):
        m_before, m = m, torch.maximum(log_f[:, t] + m, i[:, t])
        if signed:
            m = m.detach()
            forget, write = torch.tanh(f[:, t] / 2) * torch.exp(m_before - m), torch.exp(i[:, t] - m)
        else:
            forget, write = torch.exp(log_f[:, t] + m_before - m), torch.exp(i[:, t] - m)
        C = forget[..., None, None] * C + write[..., None, None] * k[:, t, :, :, None] * v[:, t, :, None, :]
        n = forget[..., None] * n + write[..., None] * k[:, t]
        read = torch.einsum("bhkv,bhk->bhv", C, q[:, t])
        scale = normaliser((n * q[:, t]).sum(-1), m)
        outputs.append(read / scale[..., None])
    return torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v), MLSTMCell(C, n, m)


def log_size(f: Tensor) -> Tensor:
    """log |tanh(f / 2)|, at least log SMALLEST: the decay of the stabiliser m under a signed gate.

    A constant for the gradient. m cancels in h, and at f = 0, through which training may carry a gate, the
    logarithm has no derivative; the gate itself has.
    """
    return torch.tanh(f.detach() / 2).abs().clamp(min=SMALLEST).log()


def log_forget(f: Tensor) -> Tensor:
    """log sigmoid(f), at least LOWEST_LOG; NaN stays."""
    return F.logsigmoid(f).clamp(min=LOWEST_LOG)


def normaliser(nq: Tensor, m: Tensor) -> Tensor:
    """max(|n . q|, 1), both divided by exp(m)."""
    # below exp(-80) outputs vanish anyway; without the bound exp(-m) could become infinite in float32
    return torch.maximum(nq.abs(), torch.exp(-m.clamp(min=-80.0))) + EPS
