"""The gated activation with GELU: both backends are one function, forward and every gradient."""

import pytest
import torch
from sm90 import assert_fits, compile_sm90

from statetrack.errors import UserError
from statetrack.ops.geglu import geglu
from statetrack.ops.swiglu.triton.backend import constants


def outcome(given, **options):
    x = given.clone().requires_grad_()
    y = geglu(x, **options)
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


def test_the_op_passes_the_checks_of_torch_library():
    from statetrack.ops.geglu.triton import backend as triton_backend  # noqa: F401

    torch.library.opcheck(torch.ops.statetrack.geglu.default, (torch.randn(3, 48, requires_grad=True),))


def test_second_derivatives_are_refused():
    x = torch.randn(3, 48, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(geglu(x, backend="triton").sum(), x, create_graph=True)


def test_an_odd_last_axis_is_refused():
    with pytest.raises(UserError, match="even last axis"):
        geglu(torch.ones(3, 5))


@pytest.mark.parametrize("W", [128, 192])
def test_the_kernels_compile_for_sm_90_without_spills(W):
    fixed = constants(W)
    warps, module = fixed.pop("num_warps"), "statetrack.ops.geglu.triton.kernels"
    for kernel, names in (("geglu_kernel", ("x", "out")), ("geglu_backward_kernel", ("x", "dout", "dx"))):
        types = dict.fromkeys(names, "*bf16") | {"rows": "i32"}
        assert_fits(compile_sm90(f"{module}:{kernel}", types, fixed, warps))
