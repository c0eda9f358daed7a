"""The split with its SiLU: both backends are one function, forward and gradient."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.ops import silu_split


def outcome(given, widths, **options):
    x = given.clone().requires_grad_()
    parts = silu_split(x, widths, **options)
    generator = torch.Generator().manual_seed(1)
    sum((y.float() * torch.randn(y.shape, generator=generator)).sum() for y in parts).backward()
    return [*(y.detach() for y in parts), x.grad]


@pytest.mark.parametrize(
    ("rows", "N", "widths"),
    [
        (1, 80, (24, 24, 24, 8)),
        (3, 200, (60, 60, 60, 4)),
        (33, 392, (128, 128, 128, 4)),
        (5, 99, (7, 50, 3, 1)),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_triton_matches_the_reference(rows, N, widths, dtype, tolerance):
    x = 3 * torch.randn(rows, N, generator=torch.Generator().manual_seed(N)).to(dtype)
    ours, theirs = outcome(x, widths, backend="triton"), outcome(x.float(), widths, backend="reference")
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype
        assert a.is_contiguous()
        torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=tolerance)


def test_the_op_passes_the_checks_of_torch_library():
    from statetrack.ops.silu_split import triton_backend  # noqa: F401

    x = torch.randn(2, 3, 48, requires_grad=True)
    torch.library.opcheck(torch.ops.statetrack.silu_split.default, (x, [16, 16, 8, 4]))


def test_second_derivatives_are_refused():
    x = torch.randn(3, 48, requires_grad=True)
    out = silu_split(x, (16, 16, 8, 8), backend="triton")[0]
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_wrong_inputs_are_explained():
    with pytest.raises(UserError, match="of at most 48 together"):
        silu_split(torch.ones(3, 48), (16, 16, 16, 1))
