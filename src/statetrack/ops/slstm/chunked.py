"""The sLSTM with a light loop: what needs no h_{t-1} is computed for all steps at once, also backwards."""

import torch
import torch.nn.functional as F
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.slstm.reference import SLSTMCell, fresh_cell


def slstm_chunked(
    x: Tensor, R: Tensor, state: SLSTMCell | None = None, bias: Tensor | None = None
) -> tuple[Tensor, SLSTMCell]:
    """Same arguments and results as `slstm_reference`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, R = x.to(dtype), R.to(dtype)
    x = x if bias is None else x + bias.to(dtype)
    cell = fresh_cell(x[:, :1]) if state is None else SLSTMCell(*(s.to(dtype) for s in state))
    if x.shape[1] == 0:
        return x[..., 0, :], cell
    # (T, H, B, 4 D): a step is one contiguous block, and its product with R one batched matrix product
    steps = x.permute(1, 2, 0, 3, 4).flatten(-2).contiguous()
    h, c, n, m = _Scan.apply(steps, R, *(s.transpose(0, 1).contiguous() for s in cell))
    last = SLSTMCell(*(s.transpose(0, 1) for s in (h[-1], c, n, m)))
    return h.permute(2, 0, 1, 3), last


class _Scan(torch.autograd.Function):
    """x (T, H, B, 4 D), R (H, D, 4 D), h, c, n, m (H, B, D) -> all h (T, H, B, D) and the last c, n, m."""

    @staticmethod
    def forward(ctx, x: Tensor, R: Tensor, h0: Tensor, c0: Tensor, n0: Tensor, m0: Tensor):
        forward = without_dispatcher(x, _forward, torch.ops.statetrack.slstm_steps_forward)
        gates, h, c, n, m = forward(x, R, h0, c0, n0, m0)
        ctx.save_for_backward(gates, R, h, c, n, m)
        ctx.set_materialize_grads(False)
        return h[1:].clone(), c[-1].clone(), n[-1].clone(), m[-1].clone()

    @staticmethod
    @first_derivative_only
    def backward(ctx, dh: Tensor | None, dc: Tensor | None, dn: Tensor | None, dm: Tensor | None):
        saved = ctx.saved_tensors  # read once: a checkpointed block computes them again to give them
        backward = without_dispatcher(saved[0], _backward, torch.ops.statetrack.slstm_steps_backward)
        *gradients, dm = backward(*saved, dh, dc, dn, dm)
        return *gradients, dm if ctx.needs_input_grad[5] else None


def _forward(x, R, h0, c0, n0, m0) -> list[Tensor]:
    """The gates of all steps, and h, c, n, m (T + 1, H, B, D), the first ones in front."""
    T, shape = x.shape[0], h0.shape
    gates = torch.empty_like(x)
    h, c, n, m = (torch.cat([s[None], s.new_empty(T, *shape)]) for s in (h0, c0, n0, m0))
    # views of single steps, made at once: slicing in the loop would cost as much as computing
    steps = zip(x, gates, *gates.unflatten(-1, (4, -1)).unbind(-2), strict=True)
    h_, c_, n_, m_ = (s.unbind(0) for s in (h, c, n, m))
    for t, (x_t, gates_t, i, f, z, o) in enumerate(steps):
        torch.baddbmm(x_t, h_[t], R, out=gates_t)
        log_forget = F.logsigmoid(f).add_(m_[t])
        torch.maximum(log_forget, i, out=m_[t + 1])
        forget, write = log_forget.sub_(m_[t + 1]).exp_(), torch.sub(i, m_[t + 1]).exp_()
        torch.addcmul(write * torch.tanh(z), forget, c_[t], out=c_[t + 1])
        torch.addcmul(write, forget, n_[t], out=n_[t + 1])
        torch.mul(torch.sigmoid(o), c_[t + 1] / n_[t + 1], out=h_[t + 1])
    return [gates, h, c, n, m]


def _forward_fake(x, R, h0, c0, n0, m0) -> list[Tensor]:
    return [torch.empty_like(x), *(s.new_empty(x.shape[0] + 1, *s.shape) for s in (h0, c0, n0, m0))]


def _backward(gates, R, h, c, n, m, dh_out, dc, dn, dm) -> list[Tensor]:
    """The gradients of x, R, h0, c0, n0 and m0, in that order."""
    by_m = None if dc is dn is dm is None else _through_m(gates, c, n, m, dc, dn, dm)
    dh_out = torch.zeros_like(h[1:]) if dh_out is None else dh_out
    dc, dn = (torch.zeros_like(h[0]) if x is None else x for x in (dc, dn))
    i, f, z, o = gates.unflatten(-1, (4, -1)).unbind(-2)
    write, forget = torch.exp(i - m[1:]), torch.exp(F.logsigmoid(f) + m[:-1] - m[1:])
    z, o, y = torch.tanh(z), torch.sigmoid(o), c[1:] / n[1:]
    dc_dh, dn_dh = o / n[1:], -o * y / n[1:]
    # derivatives of c and of n by the gates i, f, z before their functions; o enters h only
    slope_f, zero = forget * torch.sigmoid(-f), torch.zeros_like(z)
    by_c = torch.stack([write * z, slope_f * c[:-1], write * (1 - z * z)], dim=-2)
    by_n = torch.stack([write, slope_f * n[:-1], zero], dim=-2)
    by_h = y * o * (1 - o)
    dgates, back = torch.empty_like(gates), R.mT.contiguous()
    split = dgates.unflatten(-1, (4, -1))
    steps = zip(
        dh_out, dc_dh, dn_dh, by_c, by_n, by_h, forget, split[..., :3, :], split[..., 3, :], strict=True
    )
    after = None  # the gradient of the gates one step later
    for t, (dh, to_c, to_n, from_c, from_n, from_h, keep, d_ifz, d_o) in reversed([*enumerate(steps)]):
        dh = dh if after is None else torch.baddbmm(dh, after, back)
        dc, dn = torch.addcmul(dc, dh, to_c), torch.addcmul(dn, dh, to_n)
        torch.addcmul(from_c * dc[..., None, :], from_n, dn[..., None, :], out=d_ifz)
        if by_m is not None:
            d_ifz[..., :2, :] += by_m[0][t]
        torch.mul(from_h, dh, out=d_o)
        dc, dn, after = dc * keep, dn * keep, dgates[t]
    dR = torch.einsum("thbd,thbg->hdg", h[:-1], dgates)
    # c and n enter as c exp(m) and n exp(m); the largest exponent may be the first one
    dm = dc * c[0] + dn * n[0] + (0.0 if by_m is None else by_m[1])
    return [dgates, dR, dgates[0] @ back, dc, dn, dm]


def _backward_fake(gates, R, h, c, n, m, dh_out, dc, dn, dm) -> list[Tensor]:
    return [torch.empty_like(x) for x in (gates, R, h[0], c[0], n[0], m[0])]


def _through_m(gates: Tensor, c: Tensor, n: Tensor, m: Tensor, dc, dn, dm) -> tuple[Tensor, Tensor]:
    """What the last c, n and m pass on through m alone: to the gates i and f (T, H, B, 2, D), and to m_0.

    c and n are divided by exp(m), so m_T has the gradient dm - dc c - dn n. It goes back along the larger of
    log sigmoid(f_t) + m_{t-1} and i_t, as torch.maximum does; h does not depend on m.
    """
    total = torch.zeros_like(m[0]) if dm is None else dm
    for gradient, value in ((dc, c[-1]), (dn, n[-1])):
        total = total if gradient is None else total - gradient * value
    i, f, _, _ = gates.unflatten(-1, (4, -1)).unbind(-2)
    old = F.logsigmoid(f) + m[:-1]
    stays = torch.where(old == i, 0.5, (old > i).to(total.dtype))
    reaches = stays.flip(0).cumprod(0).flip(0)  # to step t - 1; to step t, the next row
    reached = total * torch.cat([reaches[1:], torch.ones_like(reaches[:1])])
    by_gates = torch.stack([(1 - stays) * reached, stays * reached * torch.sigmoid(-f)], dim=-2)
    return by_gates, reaches[0] * total


_CELL = "Tensor h{0}, Tensor c{0}, Tensor n{0}, Tensor m{0}"
# one op each for torch.compile, which would unroll the loops
register_op(
    f"slstm_steps_forward(Tensor x, Tensor R, {_CELL.format(0)}) -> Tensor[]", _forward, _forward_fake
)
register_op(
    f"slstm_steps_backward(Tensor gates, Tensor R, {_CELL.format('')}, Tensor? dh, Tensor? dc, Tensor? dn, "
    "Tensor? dm) -> Tensor[]",
    _backward,
    _backward_fake,
)
