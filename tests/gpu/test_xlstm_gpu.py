"""The sLSTM's kernels, and bracketed expressions, on a GPU against their references."""

import pytest
import torch

from statetrack.ops.bracket_expressions import bracket_expressions
from statetrack.ops.slstm import slstm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("B", "T", "H", "D"), [(1024, 40, 4, 32), (130, 33, 1, 64), (17, 5, 2, 24)])
def test_slstm_matches_float64(B, T, H, D):
    generator = torch.Generator("cuda").manual_seed(0)
    x = 2 * torch.randn((B, T, H, 4, D), generator=generator, device="cuda")
    R = torch.randn((H, D, 4 * D), generator=generator, device="cuda") / D**0.5
    results = []
    for dtype, backend in ((torch.float64, "reference"), (torch.float32, "triton")):
        leaves = [y.detach().to(dtype).requires_grad_() for y in (x, R)]
        h, _ = slstm(*leaves, backend=backend)
        weights = torch.linspace(-1, 1, h.numel(), device="cuda", dtype=dtype).view_as(h)
        results.append([h, *torch.autograd.grad((h * weights).sum(), leaves)])
    for expected, actual in zip(*results, strict=True):
        assert (actual - expected).norm() < 2e-5 * expected.norm()


@pytest.mark.parametrize(("B", "T"), [(1024, 38), (33, 253)])
def test_bracketed_expressions_are_those_of_the_reference(B, T):
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(high: int) -> torch.Tensor:
        return torch.randint(high, (B, T), generator=generator, device="cuda")

    sizes = 1 + torch.randint(T, (B,), generator=generator, device="cuda")
    splits = torch.rand((B, T), generator=generator, device="cuda", dtype=torch.float64)
    inputs = sizes, draw(5), draw(3), splits, 5
    for actual, expected in zip(
        bracket_expressions(*inputs, backend="triton"),
        bracket_expressions(*inputs, backend="reference"),
        strict=True,
    ):
        assert torch.equal(actual, expected)
