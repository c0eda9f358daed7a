"""The sLSTM recurrence, one step at a time: the definition the fast form is tested against."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class SLSTMCell(NamedTuple):
    """Output h, cell c and normaliser n; c and n are divided by exp(m). All (B, H, D)."""

    h: Tensor
    c: Tensor
    n: Tensor
    m: Tensor  # -inf before the first step


def fresh_cell(x: Tensor) -> SLSTMCell:
    """The state before the first step of x (B, T, H, 4, D)."""
    B, _, H, _, D = x.shape
    zeros = x.new_zeros(B, H, D)
    return SLSTMCell(zeros, zeros, zeros, torch.full_like(zeros, -float("inf")))


def slstm_reference(
    x: Tensor, R: Tensor, state: SLSTMCell | None = None, bias: Tensor | None = None
) -> tuple[Tensor, SLSTMCell]:
    """Run the recurrence of the sLSTM (Beck et al. 2024): an LSTM with an exponential input gate.

        (i, f, z, o)_t = x_t + b + R h_{t-1}
        c_t = sigmoid(f_t) c_{t-1} + exp(i_t) tanh(z_t)
        n_t = sigmoid(f_t) n_{t-1} + exp(i_t)
        h_t = sigmoid(o_t) c_t / n_t

    computed with c and n divided by exp(m_t), m_t = max(log sigmoid(f_t) + m_{t-1}, i_t), which cancels in h.
    The gates see the last output, so the recurrence is not linear and has no parallel form.
    Shapes: x (B, T, H, 4, D), the four gates before their functions; R (H, D, 4 D), one matrix per head; b
    (H, 4, D), 0 when None.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, R = x.to(dtype), R.to(dtype)
    x = x if bias is None else x + bias.to(dtype)
    h, c, n, m = fresh_cell(x) if state is None else state
    outputs = []
    for t in range(x.shape[1]):
        i, f, z, o = (x[:, t] + torch.einsum("bhd,hdg->bhg", h, R).unflatten(-1, (4, -1))).unbind(-2)
        log_forget = F.logsigmoid(f) + m
        m = torch.maximum(log_forget, i)
        forget, write = torch.exp(log_forget - m), torch.exp(i - m)
        c = forget * c + write * torch.tanh(z)
        n = forget * n + write
        h = torch.sigmoid(o) * c / n
        outputs.append(h)
    return torch.stack(outputs, dim=1) if outputs else x[..., 0, :], SLSTMCell(h, c, n, m)
