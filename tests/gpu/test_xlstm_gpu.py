"""The sLSTM's kernels, and bracketed expressions, on a GPU against their references."""

import pytest
import torch

from statetrack.ops.bracket_expressions import bracket_expressions
from statetrack.ops.mlstm import mlstm
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("B", "T", "H", "K"), [(64, 40, 4, 64), (32, 64, 1, 128), (5, 17, 2, 24)])
def test_mlstm_matches_float64(B, T, H, K, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, T, H, K)] * 3 + [(B, T, H)] * 2
    q, k, v, i, f = (torch.randn(shape, generator=generator).cuda() for shape in shapes)
    given = [q.to(dtype), k.to(dtype), v.to(dtype), 2 * i, 3 + 2 * f]

    def results(inputs, backend):
        leaves = [x.detach().requires_grad_() for x in inputs]
        h, last = mlstm(*leaves, backend=backend)
        weights = torch.linspace(-1, 1, h.numel(), device="cuda", dtype=torch.float64).view_as(h)
        return [h, last.C, last.n, *torch.autograd.grad((h.double() * weights).sum(), leaves)]

    expected = results([x.double() for x in given], "reference")
    for x, y in zip(results(given, "triton"), expected, strict=True):
        bound = 5e-5 if x.dtype == torch.float32 and dtype == torch.float32 else 2e-2
        assert (x - y).abs().max() <= bound * y.abs().max()
