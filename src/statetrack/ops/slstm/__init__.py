"""The sLSTM: a scalar memory whose gates see the last output. Not linear, so it stays a loop over time."""

from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.autograd import run_backend
from statetrack.ops.backends import load, no_triton, pick_backend
from statetrack.ops.slstm.reference import SLSTMCell

# "chunked" is the name of the plain PyTorch backend that "auto" takes; here its chunks are single steps.
BACKENDS = {
    "reference": "statetrack.ops.slstm.reference:slstm_reference",
    "chunked": "statetrack.ops.slstm.chunked:slstm_chunked",
    "triton": "statetrack.ops.slstm.triton.backend:slstm_triton",
}


def _triton_refuses(x: Tensor) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    return no_triton(x) or load("statetrack.ops.slstm.triton.backend:refuses")(x)


def slstm(
    x: Tensor, R: Tensor, *, initial_state: SLSTMCell | None = None, backend: str = "auto"
) -> tuple[Tensor, SLSTMCell]:
    """Apply the sLSTM (Beck et al. 2024) along time: an LSTM with an exponential input gate.

        (i, f, z, o)_t = x_t + R h_{t-1}
        c_t = sigmoid(f_t) c_{t-1} + exp(i_t) tanh(z_t)
        n_t = sigmoid(f_t) n_{t-1} + exp(i_t)
        h_t = sigmoid(o_t) c_t / n_t

    Shapes: x (B, T, H, 4, D), the input's part of the gates i, f, z, o before their activation functions;
    R (H, D, 4 D), one matrix per head. The gates depend on the last output, so the recurrence is not linear
    and stays a loop over time. c and n are kept divided by exp(m_t), m_t = max(log sigmoid(f_t) + m_{t-1},
    i_t), which cancels in h.

    Returns h (B, T, H, D) in the dtype of x, and the last state, an `SLSTMCell` of h, c, n and m (B, H, D) in
    float32 (float64 if x is), which a later call takes as `initial_state`. `backend` is "auto", "reference",
    "chunked" or "triton" (GPU).

    >>> x, R = torch.randn(2, 16, 4, 4, 32), torch.randn(4, 32, 128) / 32       # B, T, H, D = 2, 16, 4, 32
    >>> h, state = slstm(x, R)
    >>> h.shape, state.c.shape
    (torch.Size([2, 16, 4, 32]), torch.Size([2, 4, 32]))
    """
    op = "slstm"
    checks.check_tensors(op, x=x, R=R)
    if x.ndim != 5 or x.shape[3] != 4:
        raise UserError(f"{op}: x has shape {tuple(x.shape)}, expected (batch, time, heads, 4 gates, width).")
    H, D = x.shape[2], x.shape[4]
    checks.check_floating(op, x.device, x=x, R=R)
    checks.check_shape(op, "R", R, (H, D, 4 * D), "(heads, width, 4 * width)")
    shape = (x.shape[0], H, D)
    cell = checks.check_cell(op, initial_state, x, h=shape, c=shape, n=shape, m=shape)
    if checks.is_checked():
        checks.check_finite(op, time=1, x=x)
        checks.check_finite(op, R=R)
    run = pick_backend(op, backend, x.device, BACKENDS, {"triton": lambda: _triton_refuses(x)})
    h, state = run_backend(op, run, x.device, x, R, None if cell is None else SLSTMCell(*cell))
    return h.to(x.dtype), state


__all__ = ["SLSTMCell", "slstm"]
