"""Layer normalisation of sums: both backends are one function, forward and every gradient."""

import pytest
import torch
from sm90 import assert_fits, compile_sm90

from statetrack.errors import UserError
from statetrack.ops.layer_norm import add_layer_norm
from statetrack.ops.layer_norm.triton import backend as triton_backend

SIZES = [(1, 24), (3, 60), (33, 128), (130, 32), (2, 3000)]


def inputs(rows=33, N=128, dtype=torch.float32, y_dtype=None):
    generator = torch.Generator().manual_seed(rows + N)
    x = (3 + torch.randn(rows, N, generator=generator)).to(dtype)
    y = None if y_dtype is None else torch.randn(rows, N, generator=generator).to(y_dtype)
    weight, bias = torch.randn(2, N, generator=generator)
    return x, y, weight, bias


def outcome(given, **options):
    """Both results and every gradient for a fixed random loss of both."""
    leaves = [None if z is None else z.clone().requires_grad_() for z in given]
    # twice the first: an input that comes back as it is must not be a leaf for the test
    results = add_layer_norm(2 * leaves[0], *leaves[1:], **options)
    generator = torch.Generator().manual_seed(1)
    sum((z.float() * torch.randn(z.shape, generator=generator)).sum() for z in results).backward()
    return [z.detach() for z in results] + [z.grad for z in leaves if z is not None]


def assert_same(given, tolerance=1e-5, **options):
    wide = [None if z is None else z.float() for z in given]
    ours, theirs = outcome(given, backend="triton", **options), outcome(wide, backend="reference")
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize(("rows", "N"), SIZES)
@pytest.mark.parametrize("y_dtype", [None, torch.float32])
def test_triton_matches_the_reference(rows, N, y_dtype):
    assert_same(inputs(rows, N, y_dtype=y_dtype))


def test_triton_takes_and_gives_half_precision():
    assert_same(inputs(y_dtype=torch.float16), 3e-3, out_dtype=torch.float16)
    total, out = add_layer_norm(*inputs(y_dtype=torch.float16), out_dtype=torch.float16, backend="triton")
    assert (total.dtype, out.dtype) == (torch.float32, torch.float16)


def test_many_tiles_per_program_are_one_sum(monkeypatch):
    from statetrack.ops.rms_norm.triton import backend as grids

    monkeypatch.setattr(grids, "PROGRAMS_PER_PROCESSOR", 2)
    assert_same(inputs(rows=70, y_dtype=torch.float32))


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("y_dtype", [None, torch.float32])
def test_either_result_may_go_unused(used, y_dtype):
    given = inputs(rows=3, N=24, y_dtype=y_dtype)
    found = {}
    for backend in ("reference", "triton"):
        leaves = [None if z is None else z.clone().requires_grad_() for z in given]
        add_layer_norm(2 * leaves[0], *leaves[1:], backend=backend)[used].square().sum().backward()
        found[backend] = [torch.zeros_like(z) if z.grad is None else z.grad for z in leaves if z is not None]
    for a, b in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_float64_keeps_its_digits():
    x, y, weight, bias = (z.double() for z in inputs(3, 24, y_dtype=torch.float32))
    s, out = add_layer_norm(x, y, weight, bias)
    centred = s - s.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_the_op_passes_the_checks_of_torch_library():
    x, y, weight, bias = inputs(3, 24, y_dtype=torch.float16)
    for added in (y, None):
        torch.library.opcheck(
            torch.ops.statetrack.layer_norm.default, (x, added, weight, bias, 1e-5, torch.float16)
        )


def test_second_derivatives_are_refused():
    x, y, weight, bias = (z.requires_grad_() for z in inputs(3, 24, y_dtype=torch.float32))
    out = add_layer_norm(x, y, weight, bias, backend="triton")[1]
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(out.square().sum(), x, create_graph=True)


def test_wrong_inputs_are_explained():
    x, y, weight, bias = inputs(3, 24, y_dtype=torch.float32)
    with pytest.raises(UserError, match="bias has shape"):
        add_layer_norm(x, y, weight, bias[:20])
    with pytest.raises(UserError, match="y has shape"):
        add_layer_norm(x, y[:2], weight, bias)
    with pytest.raises(UserError, match="float64"):
        add_layer_norm(x.double(), None, weight, bias, backend="triton")


@pytest.mark.parametrize(
    ("N", "x", "y"), [(64, "*fp32", "*bf16"), (128, "*fp32", "*bf16"), (4096, "*fp32", "*fp32")]
)
def test_the_kernels_compile_for_sm_90_without_spills(N, x, y):
    constants = triton_backend.constants(N)
    warps, module = constants.pop("num_warps"), "statetrack.ops.layer_norm.triton.kernels"
    numbers = {"rows": "i32", "eps": "fp32"}
    types = {"x": x, "y": y, "weight": "*fp32", "bias": "*fp32", "total": x, "out": y} | numbers
    assert_fits(compile_sm90(f"{module}:layer_norm_kernel", types, constants | {"HAS_Y": True}, warps))
    types = {
        "s": x,
        "weight": "*fp32",
        "dtotal": x,
        "dout": y,
        "dx": x,
        "dy": y,
        "partial": "*fp32",
    } | numbers
    flags = {"HAS_DTOTAL": True, "HAS_DY": True}
    name = f"{module}:layer_norm_backward_kernel"
    assert_fits(compile_sm90(name, types | {"tiles": "i32"}, constants | flags, warps))
