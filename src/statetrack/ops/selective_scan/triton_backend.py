"""The Triton backend of the selective scan: `torch.library` ops around the two kernels."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.selective_scan.triton_kernels import backward_kernel, forward_kernel

L = 16  # steps between stored states: they are then as many numbers as u for 16 states per channel
CHANNELS = 16  # of one program; 32 measured a quarter slower at the layouts of a Mamba layer
MOST_STATES = 64
PROGRAMS_PER_SM = 16


def selective_scan_triton(
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
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `selective_scan_reference`; the output has the dtype of u."""
    B, C = (x[:, 0] if x.ndim == 4 else x for x in (B, C))
    extended = eigenvalues == "[-1,1]"
    out, last, _ = scan_forward(u, delta, A, B, C, D, z, delta_bias, state, delta_softplus, extended)
    return out, last


def refuses(u: Tensor, A: Tensor, B: Tensor, C: Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if any(x.ndim == 2 or (x.ndim == 4 and x.shape[1] > 1) for x in (B, C)):
        return "B and C are constant or come in several groups"
    if A.shape[1] > MOST_STATES:
        return f"A has {A.shape[1]} states per channel, more than {MOST_STATES}"
    if u.numel() == 0:
        return "the input is empty"
    return "float64 is not offered there" if u.dtype == torch.float64 else None


def _constants(A: Tensor, D, z, bias, softplus: bool, extended: bool) -> dict[str, Any]:
    N = A.shape[1]
    return {
        "N": N,
        "BN": 1 << (N - 1).bit_length(),
        "BD": CHANNELS,
        "L": L,
        "HAS_D": D is not None,
        "HAS_Z": z is not None,
        "HAS_BIAS": bias is not None,
        "SOFTPLUS": softplus,
        "EXTENDED": extended,
    }


def _strides(*tensors: Tensor) -> Any:
    return [stride for x in tensors for stride in x.stride()]


def _programs(u: Tensor) -> int:
    """As many programs as the GPU runs at once, or as there is work."""
    work = u.shape[0] * -(-u.shape[1] // CHANNELS)
    if not u.is_cuda:
        return work
    return min(work, PROGRAMS_PER_SM * torch.cuda.get_device_properties(u.device).multi_processor_count)


@torch.library.custom_op("statetrack::selective_scan_forward", mutates_args=())
def scan_forward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    state: Tensor | None,
    softplus: bool,
    extended: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, last states, and the state before every L-th step."""
    (batch, channels, T), N = u.shape, A.shape[1]
    A = A.contiguous()
    out = torch.empty_like(u)
    last = u.new_empty(batch, channels, N, dtype=torch.float32)
    saved = u.new_empty(batch, -(-T // L), channels, N, dtype=torch.float32)
    constants: dict[str, Any] = _constants(A, D, z, bias, softplus, extended)
    constants |= {"HAS_STATE": state is not None, "SAVE": True}
    forward_kernel[(_programs(u),)](
        u, delta, A, B, C, A if D is None else D.contiguous(), u if z is None else z,
        A if bias is None else bias.contiguous(), A if state is None else state.contiguous(),
        out, last, saved,
        batch, channels, T, *_strides(u, delta, u if z is None else z, out, B, C),
        **constants, **_launch(),
    )  # fmt: skip
    return out, last, saved


def _launch() -> dict[str, Any]:
    return {"num_warps": 1}


@scan_forward.register_fake
def _(u, delta, A, B, C, D, z, bias, state, softplus, extended):
    (batch, channels, T), N = u.shape, A.shape[1]
    last = u.new_empty(batch, channels, N, dtype=torch.float32)
    return torch.empty_like(u), last, u.new_empty(batch, -(-T // L), channels, N, dtype=torch.float32)


@torch.library.custom_op("statetrack::selective_scan_backward", mutates_args=())
def scan_backward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    saved: Tensor,
    dout: Tensor,
    dlast: Tensor | None,
    softplus: bool,
    extended: bool,
) -> list[Tensor]:
    """Gradients of u, delta, A, B, C, D, z, the bias and the first state, whether or not there were any."""
    (batch, channels, T), N = u.shape, A.shape[1]
    A = A.contiguous()
    blocks, programs = -(-channels // CHANNELS), _programs(u)
    constants: dict[str, Any] = _constants(A, D, z, bias, softplus, extended)
    constants |= {"HAS_LAST": dlast is not None}
    single = {"dtype": torch.float32, "device": u.device}
    du = torch.empty_like(u)
    # these two are written where du is, so they share its layout
    ddelta, dz = (torch.empty_like(du, dtype=x.dtype) for x in (delta, u if z is None else z))
    dA, dstate = (torch.empty(batch, channels, N, **single) for _ in range(2))
    dB, dC = (torch.empty(blocks, batch, T, N, **single) for _ in range(2))
    dD = torch.empty(batch, channels, **single)
    scratch = torch.empty(programs, L, CHANNELS, constants["BN"], **single)
    backward_kernel[(programs,)](
        u, delta, A, B, C, A if D is None else D.contiguous(), u if z is None else z,
        A if bias is None else bias.contiguous(), saved, scratch,
        dout, dA if dlast is None else dlast.contiguous(), du, ddelta, dA, dB, dC, dD, dz, dstate,
        batch, channels, T,
        *_strides(u, delta, u if z is None else z, dout, du, B, C), **constants, **_launch(),
    )  # fmt: skip
    dbias = ddelta.sum((0, 2), dtype=torch.float32)
    return [
        du,
        ddelta,
        dA.sum(0),
        dB.sum(0).mT.contiguous(),
        dC.sum(0).mT.contiguous(),
        dD.sum(0),
        dz,
        dbias,
        dstate,
    ]


@scan_backward.register_fake
def _(u, delta, A, B, C, D, z, bias, saved, dout, dlast, softplus, extended):
    (batch, channels, T), N = u.shape, A.shape[1]
    single = {"dtype": torch.float32, "device": u.device}
    weights = [torch.empty(batch, N, T, **single) for _ in range(2)]
    per_channel = [torch.empty(channels, **single) for _ in range(2)]
    du = torch.empty_like(u)
    ddelta, dz = (torch.empty_like(du, dtype=x.dtype) for x in (delta, u if z is None else z))
    dA, dstate = torch.empty(channels, N, **single), torch.empty(batch, channels, N, **single)
    return [du, ddelta, dA, *weights, per_channel[0], dz, per_channel[1], dstate]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.softplus, ctx.extended = inputs
    ctx.save_for_backward(*tensors[:-1], output[2])
    ctx.present = [x is not None for x in tensors]
    ctx.dtypes = [None if x is None else x.dtype for x in tensors]
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlast, dsaved):
    *inputs, saved = ctx.saved_tensors
    dout = torch.zeros_like(inputs[0]) if dout is None else dout
    gradients = scan_backward(*inputs, saved, dout, dlast, ctx.softplus, ctx.extended)
    kept = [
        g.to(dtype) if there else None
        for g, there, dtype in zip(gradients, ctx.present, ctx.dtypes, strict=True)
    ]
    return *kept, None, None


scan_forward.register_autograd(_backward, setup_context=_setup_context)
