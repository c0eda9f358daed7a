"""The gated activation: both backends are one function, forward and every gradient."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.ops.swiglu import swiglu, swiglu_product


def outcome(given, **options):
    x = given.clone().requires_grad_()
    y = swiglu(x, **options)
    (y.float() * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    return [y.detach(), x.grad]


@pytest.mark.parametrize(("rows", "W"), [(1, 24), (3, 60), (33, 128), (3, 200), (2, 600)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_triton_matches_the_reference(rows, W, dtype, tolerance):
    x = 3 * torch.randn(rows, 2 * W, generator=torch.Generator().manual_seed(W)).to(dtype)
    ours, theirs = outcome(x, backend="triton"), outcome(x.float(), backend="reference")
    assert ours[0].dtype == dtype
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=tolerance)


def test_axes_in_front_are_kept():
    x = torch.randn(2, 3, 48)
    torch.testing.assert_close(swiglu(x, backend="triton"), swiglu(x, backend="reference"))


def product_outcome(x, weight, **options):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = swiglu_product(x, weight, **options)
    (y.float() * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    return [y.detach(), x.grad, weight.grad]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 5e-3)])
def test_with_its_linear_map_triton_matches_the_reference(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 5, 120, generator=generator), torch.randn(24, 60, generator=generator) / 8
    theirs = product_outcome(x.to(dtype).float(), weight.to(dtype).float(), backend="reference")
    ours = product_outcome(x.to(dtype), weight.to(dtype), backend="triton")
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        torch.testing.assert_close(swiglu_product(x, weight, backend="triton"), product_of(x, weight))


def product_of(x, weight):
    return swiglu(x, backend="reference") @ weight.T


def test_with_its_linear_map_only_the_input_is_kept():
    x, weight = torch.randn(3, 120, requires_grad=True), torch.randn(24, 60, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda z: kept.append(z.shape) or z, lambda z: z):
        swiglu_product(x, weight, backend="triton")
    assert kept == [x.shape, weight.shape]


def test_under_autocast_a_float32_weight_is_rounded():
    x, weight = torch.randn(3, 120).half(), torch.randn(24, 60, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        y = swiglu_product(x, weight, backend="triton")
    y.float().sum().backward()
    assert (y.dtype, weight.grad.dtype) == (torch.float16, torch.float32)
    torch.testing.assert_close(y, product_of(x, weight.half()), rtol=1e-2, atol=1e-2)


def test_the_op_passes_the_checks_of_torch_library():
    from statetrack.ops.swiglu.triton import backend as triton_backend  # noqa: F401

    torch.library.opcheck(torch.ops.statetrack.swiglu.default, (torch.randn(3, 48, requires_grad=True),))


def test_second_derivatives_are_refused():
    x = torch.randn(3, 48, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(swiglu(x, backend="triton").sum(), x, create_graph=True)


def test_wrong_inputs_are_explained():
    with pytest.raises(UserError, match="even last axis"):
        swiglu(torch.ones(3, 5))
    with pytest.raises(UserError, match="expected \\(n, 3\\)"):
        swiglu_product(torch.ones(3, 6), torch.ones(4, 6))
