"""The gated activation: both backends are one function, forward and every gradient."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.ops.swiglu import swiglu


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
