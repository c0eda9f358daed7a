"""The native CPU backend of the selective scan: `torch.library` ops around the C++ kernels of ops/native."""

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.native import library
from statetrack.ops.selective_scan.packing import scan_packed

# Steps between saved states: at least the states per channel, so that they are no more numbers than u.
STEPS = 32
# Channels one thread works on together; few sequences are cut finer, so that every thread has some.
GROUP, FEW_SEQUENCES, SMALL_GROUP = 256, 8, 64


def selective_scan_native(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    state: Tensor | None,
    *,
    delta_softplus: bool,
    eigenvalues: str,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `selective_scan_reference`, in float32 whatever the inputs."""
    if cu_seqlens is not None:
        return scan_packed(
            selective_scan_native,
            *(u, delta, A, B, C, D, z, delta_bias, state),
            delta_softplus=delta_softplus,
            eigenvalues=eigenvalues,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )
    B, C = (x[:, 0] if x.ndim == 4 else x for x in (B, C))
    inputs = [
        x if x is None or x.dtype == torch.float32 else x.float()
        for x in (u, delta, A, B, C, D, z, delta_bias, state)
    ]
    keep = needs_gradient(inputs)
    return _Native.apply(*inputs, delta_softplus, eigenvalues == "[-1,1]", keep)


def refuses(u: Tensor, A: Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if u.device.type != "cpu":
        return f"the inputs are on {u.device}, not on a CPU"
    if u.dtype == torch.float64:
        return "float64 is not offered there"
    if u.numel() == 0 or A.shape[1] == 0:
        return "the input is empty"
    return library.ABSENT


def _steps(N: int) -> int:
    return -(-N // STEPS) * STEPS


def _group(batch: int) -> int:
    return GROUP if batch >= FEW_SEQUENCES else SMALL_GROUP


def _saved(u: Tensor, A: Tensor, keep: bool) -> Tensor:
    """Room for the state before every chunk, (batch, chunks, N, channels rounded up)."""
    (batch, channels, T), N = u.shape, A.shape[1]
    shape = (batch, -(-T // _steps(N)), N, -(-channels // 16) * 16) if keep else (0, 0, 0, 0)
    return torch.empty(shape, dtype=torch.float32, device=u.device)


def _sizes(u: Tensor, N: int, softplus: bool, extended: bool) -> tuple[int, ...]:
    batch, channels, T = u.shape
    shares = library.threads(8 * u.numel() * N)
    return batch, channels, T, N, _steps(N), _group(batch), softplus, extended, shares


NOTHING = (0, 0, 0, 0)


def _forward(u, delta, A, B, C, D, z, bias, state, softplus: bool, extended: bool, keep: bool):
    """Outputs, last states, and the saved states (none unless `keep`)."""
    N = A.shape[1]
    out, saved = torch.empty_like(u), _saved(u, A, keep)
    last = u.new_empty(u.shape[0], u.shape[1], N)
    A, D, bias, state = (None if x is None else x.contiguous() for x in (A, D, bias, state))
    library.expect_writes(out, saved)
    at, strided = library.address, library.strided
    library.CALL["scan_forward"](
        library.SCAN.pack(
            *_sizes(u, N, softplus, extended),
            *strided(u), *strided(delta), *strided(z), *NOTHING, *strided(B), *strided(C),
            at(A), at(D), at(bias), at(state), *strided(out), at(last), at(saved) if keep else 0,
            *(0,) * 11,
        )
    )  # fmt: skip
    return out, last, saved


def _backward(u, delta, A, B, C, D, z, bias, saved, dout, dlast, softplus: bool, extended: bool):
    """Gradients of u, delta, A, B, C, D, z, the bias and the first state, whether or not there were any."""
    (batch, channels, T), N = u.shape, A.shape[1]
    gradients = _gradients(u, A, z)
    A, D, bias, dlast = (None if x is None else x.contiguous() for x in (A, D, bias, dlast))
    du, ddelta, dA, dB, dC, dD, dz, dbias, dstate = gradients
    padded, groups = -(-channels // 16) * 16, -(-channels // _group(batch))
    sums = batch * (N + 2) * padded + (2 * batch * groups * T * N if groups > 1 else 0)
    partial = u.new_empty(sums)
    library.expect_writes(du, ddelta, dz, partial)
    at, strided = library.address, library.strided
    library.CALL["scan_backward"](
        library.SCAN.pack(
            *_sizes(u, N, softplus, extended),
            *strided(u), *strided(delta), *strided(z), *strided(dout), *strided(B), *strided(C),
            at(A), at(D), at(bias), 0, *strided(du), 0, at(saved), at(dlast),
            *map(at, (du, ddelta, dz, dA, dB, dC, dD, dbias, dstate, partial)),
        )
    )  # fmt: skip
    return gradients


def _gradients(u: Tensor, A: Tensor, z: Tensor | None) -> list[Tensor]:
    """Room for them. du, ddelta and dz share one layout, that of the output; dB and dC are time-first."""
    (batch, channels, T), N = u.shape, A.shape[1]
    du, ddelta = torch.empty_like(u), torch.empty_like(u)
    dz = u.new_empty(0) if z is None else torch.empty_like(u)
    dB, dC = (u.new_empty(batch, T, N).mT for _ in range(2))
    dA, dD, dbias = u.new_empty(channels, N), u.new_empty(channels), u.new_empty(channels)
    return [du, ddelta, dA, dB, dC, dD, dz, dbias, u.new_empty(batch, channels, N)]


class _Native(torch.autograd.Function):
    """Autograd around the two ops. `torch.library.register_autograd` takes three times as long per call."""

    @staticmethod
    def forward(ctx, u, delta, A, B, C, D, z, bias, state, softplus, extended, keep):
        forward = without_dispatcher(u, _forward, scan_forward)
        out, last, saved = forward(u, delta, A, B, C, D, z, bias, state, softplus, extended, keep)
        ctx.save_for_backward(u, delta, A, B, C, D, z, bias, saved)
        ctx.options, ctx.has_state = (softplus, extended), state is not None
        ctx.set_materialize_grads(False)
        return out, last

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dlast):
        u, delta, A, B, C, D, z, bias, saved = ctx.saved_tensors
        dout = torch.zeros_like(u) if dout is None else dout
        backward = without_dispatcher(u, _backward, scan_backward)
        du, ddelta, dA, dB, dC, dD, dz, dbias, dstate = backward(
            u, delta, A, B, C, D, z, bias, saved, dout, dlast, *ctx.options
        )
        dD, dz, dbias = (g if x is not None else None for g, x in ((dD, D), (dz, z), (dbias, bias)))
        dstate = dstate if ctx.has_state else None
        return du, ddelta, dA, dB, dC, dD, dz, dbias, dstate, None, None, None


def _forward_fake(u, delta, A, B, C, D, z, bias, state, softplus, extended, keep):
    return torch.empty_like(u), u.new_empty(u.shape[0], u.shape[1], A.shape[1]), _saved(u, A, keep)


def _backward_fake(u, delta, A, B, C, D, z, bias, saved, dout, dlast, softplus, extended):
    return _gradients(u, A, z)


INPUTS = "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? bias"
register_op(
    f"native_scan_forward({INPUTS}, Tensor? state, bool softplus, bool extended, bool keep) "
    "-> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    devices=("CPU",),
)
register_op(
    f"native_scan_backward({INPUTS}, Tensor saved, Tensor dout, Tensor? dlast, bool softplus, bool extended) "
    "-> Tensor[]",
    _backward,
    _backward_fake,
    devices=("CPU",),
)
scan_forward = torch.ops.statetrack.native_scan_forward.default
scan_backward = torch.ops.statetrack.native_scan_backward.default
