"""The sLSTM's Triton kernels against the loop of the reference: outputs, last state and every gradient."""

import pytest
import torch
from sm90 import assert_fits, compile_sm90

from statetrack.errors import UserError
from statetrack.ops.slstm import SLSTMCell, slstm
from statetrack.ops.slstm.triton.backend import weight_gradients_constants, weight_gradients_grid
from statetrack.ops.slstm.triton.kernels import backward_kernel, forward_kernel
from statetrack.ops.slstm.triton.weight_gradients import weight_gradients_kernel


def inputs(B: int, T: int, H: int, D: int, with_state: bool, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn((B, T, H, 4, D), generator=generator)
    R = torch.randn((H, D, 4 * D), generator=generator) / D**0.5
    if not with_state:
        return x, R, None
    h, c, m = (torch.randn((B, H, D), generator=generator) for _ in range(3))
    return x, R, SLSTMCell(h, c, 0.5 + torch.rand((B, H, D), generator=generator), m)


def run(x, R, state, backend, raw=False):
    """Outputs and gradients; with `raw` of a loss that reads the last c, n and m as they are."""
    leaves = [y.clone().requires_grad_() for y in (x, R, *(state or ()))]
    cell = None if state is None else SLSTMCell(*leaves[2:])
    h, last = slstm(*leaves[:2], initial_state=cell, backend=backend)
    weights = torch.linspace(-1, 1, h.numel()).view_as(h)
    # c and n alone depend on m; their quotient does not
    loss = (h * weights).sum() + (last.c / last.n * weights[:, -1]).sum() + last.h.square().sum()
    if raw:
        loss = loss + last.c.square().sum() + (last.n * weights[:, 0]).sum() + last.m.sin().sum()
    return [h, last.h, last.c / last.n, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(("B", "T", "H", "D"), [(1, 1, 1, 16), (17, 5, 2, 32), (3, 7, 2, 24), (2, 3, 1, 60)])
def test_triton_matches_the_reference_forward_and_backward(B, T, H, D, with_state):
    given = inputs(B, T, H, D, with_state)
    expected = run(*given, "reference")
    actual = run(*given, "triton")
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("with_state", [False, True])
def test_gradients_of_the_last_c_n_and_m_go_through_m(with_state):
    """h does not depend on m, but c and n are divided by exp(m)."""
    given = inputs(3, 6, 2, 16, with_state)
    expected, actual = run(*given, "reference", raw=True), run(*given, "triton", raw=True)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5)


def test_a_loss_of_the_last_cell_alone_has_gradients():
    x, R, state = inputs(2, 4, 1, 16, True)

    def gradient(backend):
        m = state.m.clone().requires_grad_()
        _, last = slstm(x, R, initial_state=state._replace(m=m), backend=backend)
        return torch.autograd.grad(last.c.sum(), m)[0]

    torch.testing.assert_close(gradient("triton"), gradient("reference"), rtol=1e-4, atol=1e-5)


def test_two_halves_with_the_state_carried_are_one_pass():
    x, R, _ = inputs(3, 8, 2, 16, False)
    whole, _ = slstm(x, R, backend="triton")
    first, state = slstm(x[:, :5], R, backend="triton")
    second, _ = slstm(x[:, 5:], R, initial_state=state, backend="triton")
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-5, atol=1e-6)


def test_without_gradients_the_last_state_is_the_same():
    x, R, state = inputs(2, 6, 2, 16, True)
    with torch.no_grad():
        h, last = slstm(x, R, initial_state=state, backend="triton")
    expected_h, expected = slstm(x, R, initial_state=state, backend="reference")
    torch.testing.assert_close(h, expected_h, rtol=1e-4, atol=1e-5)
    for a, b in zip(last, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_small_and_large_arguments_of_tanh_and_of_the_gates():
    """The series near 0 meets the formula; gates far from 0 saturate without NaN."""
    values = torch.tensor([-90.0, -5.0, -0.1415, -0.1413, -1e-4, 0.0, 1e-6, 0.14, 0.15, 3.0, 90.0])
    x = torch.zeros(len(values), 2, 1, 4, 16)
    x += values[:, None, None, None, None]
    R = torch.zeros(1, 16, 64)
    expected, _ = slstm(x, R, backend="reference")
    actual, _ = slstm(x, R, backend="triton")
    torch.testing.assert_close(actual, expected, rtol=3e-6, atol=1e-12)


def with_bias(given, backend, dtype=torch.float32):
    """Outputs and gradients of x, R and the bias."""
    x, R, bias = (y.to(dtype).detach().requires_grad_() for y in given)
    h, last = slstm(x, R, bias=bias, backend=backend)
    loss = (h * torch.linspace(-1, 1, h.numel(), dtype=dtype).view_as(h)).sum()
    return [h, last.c / last.n, *torch.autograd.grad(loss, (x, R, bias))]


@pytest.mark.parametrize(("B", "T", "H", "D"), [(1, 1, 1, 16), (17, 5, 3, 32), (4, 40, 1, 24)])
@pytest.mark.parametrize("gate_major", [False, True])
def test_a_bias_is_added_and_gates_may_lie_in_front_of_heads(B, T, H, D, gate_major):
    x, R, _ = inputs(B, T, H, D, False)
    bias = torch.randn(H, 4, D, generator=torch.Generator().manual_seed(1))
    if gate_major:
        x = x.transpose(2, 3).contiguous().transpose(2, 3)
    expected = with_bias((x, R, bias), "reference", torch.float64)
    for actual in (with_bias((x, R, bias), backend) for backend in ("triton", "chunked")):
        for a, b in zip(actual, expected, strict=True):
            assert (a - b).norm() <= 2e-5 * b.norm() + 1e-6


def test_half_precision_gates_give_outputs_and_gradients_of_r_in_the_precision_of_r():
    x, R, _ = inputs(5, 9, 2, 16, False)
    x = x.half()
    found = []
    for dtype, backend in ((torch.float64, "reference"), (torch.float32, "triton")):
        given = x.detach().requires_grad_() if backend == "triton" else x.to(dtype).requires_grad_()
        weight = R.to(dtype).requires_grad_()
        h, _ = slstm(given, weight, backend=backend)
        found.append([h, *torch.autograd.grad(h.square().sum(), (given, weight))])
    (h, dx, dR), expected = found[1], found[0]
    assert (h.dtype, dx.dtype, dR.dtype) == (torch.float32, torch.float16, torch.float32)
    for a, b, bound in zip((h, dx, dR), expected, (1e-5, 1e-3, 1e-3), strict=True):
        assert (a - b).norm() <= bound * b.norm()


def test_the_gradients_of_weights_are_shared_by_few_programs():
    """A partial gradient of a 64 wide head takes 66 KB."""
    assert weight_gradients_grid(1024 * 39, 4, 32, processors=132) == (66, 4)
    assert weight_gradients_grid(1024 * 38, 1, 64, processors=132) == (132, 1)
    assert weight_gradients_grid(70, 1, 64, processors=132) == (2, 1)


def test_a_bias_of_another_shape_is_refused():
    x, R, _ = inputs(1, 2, 2, 16, False)
    with pytest.raises(UserError, match="bias has shape"):
        slstm(x, R, bias=torch.zeros(4, 2, 16))


@pytest.mark.parametrize(("D", "warps"), [(32, 4), (64, 8)])
@pytest.mark.parametrize("dtype", ["*fp32", "*bf16"])
def test_the_kernels_compile_for_sm_90_with_few_spills(D, warps, dtype):
    layout = {"SH": D, "SG": 4 * D}
    fixed = {"D": D, "BD": D, "BB": 16} | layout
    sums = weight_gradients_constants(D) | {"BF16": dtype == "*bf16"} | layout
    del sums["num_warps"]
    variants = (
        ("kernels", forward_kernel, fixed | {"SAVE": True, "HAS_BIAS": True}),
        *(("kernels", backward_kernel, fixed | {"THROUGH_M": m}) for m in (False, True)),
        ("weight_gradients", weight_gradients_kernel, sums),
    )
    for file, kernel, constants in variants:
        numbers = dict.fromkeys(("B", "T", "H"), "i32")
        pointers = [name for name in kernel.arg_names if name not in constants | numbers]
        types = {name: dtype if name in ("x", "dgates") else "*fp32" for name in pointers} | numbers
        name = f"statetrack.ops.slstm.triton.{file}:{kernel.__name__}"
        assert_fits(
            compile_sm90(name, types, constants, warps),
            spilled={(32, "*bf16"): 0, (32, "*fp32"): 32}.get((D, dtype), 128),
        )


def test_packed_sequences_are_those_of_the_reference():
    x, R, _ = inputs(1, 12, 2, 16, False)
    bounds = torch.tensor([0, 5, 5, 6, 12])

    def packed(backend):
        leaves = [y.clone().requires_grad_() for y in (x, R)]
        h, last = slstm(*leaves, cu_seqlens=bounds, max_seqlen=7, backend=backend)
        return [h, *last, *torch.autograd.grad(h.cos().sum() + last.c.sin().sum(), leaves)]

    for actual, expected in zip(packed("triton"), packed("reference"), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)
