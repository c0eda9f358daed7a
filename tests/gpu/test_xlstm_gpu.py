"""Kernels of mLSTM, sLSTM, attention and around them, and bracketed expressions, against references."""

import copy
from dataclasses import replace

import pytest
import torch

from statetrack.experiments import tab_chomsky
from statetrack.layers import build
from statetrack.layers.fusion import fused
from statetrack.ops.bracket_expressions import bracket_expressions
from statetrack.ops.geglu import geglu
from statetrack.ops.head_norm import head_norm
from statetrack.ops.layer_norm import add_layer_norm
from statetrack.ops.mlstm import mlstm, mlstm_joined
from statetrack.ops.rotary import rotated_split
from statetrack.ops.slstm import slstm
from statetrack.training.graph_step import GraphStep
from statetrack.training.source import source_of
from statetrack.training.state import new_state

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
        results.append([h, *torch.autograd.grad((h * draw(*h.shape).to(dtype)).sum(), leaves)])
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


def with_gradients(op, given, dtype=None):
    """Results and gradients for a fixed loss; in `dtype` or as given.

    Its weights are random: with smooth ones the gradients of norms and of recurrent weights are small
    differences of large sums, and float32 itself is off by more than the bounds.
    """
    leaves = [(x if dtype is None else x.to(dtype)).detach().requires_grad_() for x in given]
    results = op(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    losses = [(y.double() * draw(*y.shape).double()).sum() for y in results]
    return [*results, *torch.autograd.grad(losses, leaves)]


def assert_as_float64(op, given, bound):
    """`op` takes a backend after its tensors."""
    expected = with_gradients(lambda *x: op(*x, "reference"), given, torch.float64)
    for a, b in zip(with_gradients(lambda *x: op(*x, "triton"), given), expected, strict=True):
        assert (a - b).norm() <= bound * b.norm()


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).cuda().to(dtype)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("H", "D"), [(4, 32), (1, 64)])
def test_slstm_with_bias_and_gates_in_front_of_heads_matches_float64(H, D, dtype, bound):
    x = (2 * draw(1024, 39, 4, H, D, dtype=dtype)).transpose(2, 3)
    given = [x, draw(H, D, 4 * D) / D**0.5, draw(H, 4, D)]
    assert_as_float64(lambda x, R, bias, backend: slstm(x, R, bias=bias, backend=backend)[0], given, bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("H", "K"), [(4, 64), (1, 128)])
def test_joined_mlstm_matches_float64(H, K, dtype, bound):
    """Input gates not so far open that the normaliser can be a sum that cancels, which magnifies rounding."""
    given = [draw(65, 39, 3, H, K, dtype=dtype), draw(65, 39, H), 3 + 2 * draw(65, 39, H)]
    assert_as_float64(lambda qkv, i, f, backend: mlstm_joined(qkv, i, f, backend=backend)[0], given, bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_norms_and_gelu_match_float64(dtype, bound):
    rows, (H, D) = 20_001, (4, 64)

    def add(x, y, w, b, backend):
        return add_layer_norm(2 * x, y, w, b, backend=backend)

    def gated(h, w, skip, c, up, backend):
        return head_norm(h, w, skip=skip, c=c, z=up[..., H * D :], backend=backend)

    assert_as_float64(add, [draw(rows, 128), draw(rows, 128, dtype=dtype), draw(128), draw(128)], bound)
    heads = [1 + draw(rows, H, D, dtype=dtype), draw(H * D)]
    assert_as_float64(lambda h, w, backend: head_norm(h, w, backend=backend), heads, bound)
    branches = [draw(H * D), draw(rows, H * D, dtype=dtype), draw(rows, 2 * H * D, dtype=dtype)]
    assert_as_float64(gated, heads + branches, bound)
    assert_as_float64(lambda x, backend: geglu(x, backend=backend), [2 * draw(rows, 384, dtype=dtype)], bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_rotated_heads_match_float64(dtype, bound):
    qkv = [draw(1024, 39, 384, dtype=dtype)]
    assert_as_float64(lambda x, backend: rotated_split(x, 4, 4, 10_000.0, backend=backend), qkv, bound)


@pytest.mark.parametrize(
    ("name", "heads"), [("mlstm", 4), ("mlstm", 1), ("slstm", 4), ("slstm", 2), ("transformer", 4)]
)
def test_fused_models_are_the_same_function_with_the_same_gradients(name, heads):
    torch.manual_seed(0)
    exact = build(name, vocab_size=7, heads=heads, layers=2).cuda().double()
    for p in exact.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    tokens = torch.randint(7, (64, 39), device="cuda")

    def outcome(model, choice):
        with fused(choice):
            logits, _ = model(tokens)
            logits.double().sin().sum().backward()
        return [logits.detach(), *(p.grad for p in model.parameters())]

    single = copy.deepcopy(exact).float()
    for a, b in zip(outcome(single, None), outcome(exact, False), strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm() + 1e-5


@pytest.mark.parametrize("panel", [tab_chomsky.PARITY, tab_chomsky.PLAIN])
@pytest.mark.parametrize("label", ["mLSTM", "sLSTM", "Transformer"])
def test_the_protocols_steps_are_recorded_and_give_the_losses_of_eager_steps(label, panel):
    runs = tab_chomsky.runs("paper", 1)
    spec = next(r.spec for r in runs if (r.panel, r.label) == (panel, label) and r.spec.training.lr == 1e-3)
    spec = replace(spec, training=replace(spec.training, batch=64)).resolved()
    losses = []
    for graphs in (True, False):
        said, device = [], torch.device("cuda")
        torch.manual_seed(0)
        step = GraphStep(spec, new_state(spec, device), source_of(spec, device), said.append, graphs=graphs)
        with step.on_stream():
            for _ in range(8):
                step()
            losses.append(step.state.loss_sum.item())
        assert not said
        assert step.uses_graphs == graphs
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
