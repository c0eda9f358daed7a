"""The mLSTM on the native CPU kernels of gated linear attention, against the loop in float64."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.ops.mlstm import MLSTMCell, mlstm, mlstm_joined
from statetrack.ops.native import library

pytestmark = pytest.mark.skipif(library.ABSENT is not None, reason="the native library was not built")


def inputs(B=2, T=150, H=2, K=12, V=9, spread=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, B, T, H, K, generator=generator, dtype=torch.float64).unbind()
    v = torch.randn(B, T, H, V, generator=generator, dtype=torch.float64)
    i, f = (spread * torch.randn(2, B, T, H, generator=generator, dtype=torch.float64)).unbind()
    return [q, k, v, i, f]


def state(B=2, H=2, K=12, V=9):
    generator = torch.Generator().manual_seed(7)
    parts = (
        torch.randn(B, H, *more, generator=generator, dtype=torch.float64) for more in ((K, V), (K,), ())
    )
    return MLSTMCell(*parts)


def run(given, backend, dtype, signed=False, cell=None, **options):
    """h, the last state, and the gradients of all inputs, those of the state among them."""
    leaves = [x.to(dtype).requires_grad_() for x in (*given, *(cell or ()))]
    initial = None if cell is None else MLSTMCell(*leaves[5:])
    h, last = mlstm(*leaves[:5], signed=signed, initial_state=initial, backend=backend, **options)
    C_over_n = last.C / (last.n.square().sum(-1)[..., None, None] + 1).sqrt()
    loss = (h * torch.linspace(-1, 1, h.numel(), dtype=h.dtype).view_as(h)).sum() + C_over_n.square().sum()
    return [h, *last, *torch.autograd.grad(loss, leaves)]


def assert_near(actual, expected, tolerance):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(
            a.double(), e, rtol=0, atol=tolerance * e.abs().max().clamp(min=1.0).item()
        )


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("T", [1, 64, 65, 150])
def test_native_is_the_loop_with_all_gradients(T, signed, carried):
    given, cell = inputs(T=T), state() if carried else None
    expected = run(given, "reference", torch.float64, signed, cell)
    assert_near(run(given, "native", torch.float32, signed, cell), expected, 2e-5)


@pytest.mark.parametrize("shift", [-80.0, 80.0])
def test_gates_that_close_or_open_for_good_keep_the_digits_that_the_loop_keeps(shift):
    """Where n . q nearly cancels, outputs have fewer digits than float32, in the loop as here."""
    given = inputs(T=130, spread=3.0)
    given[4] = given[4] + shift
    expected = run(given, "reference", torch.float64)
    native, loop = (run(given, backend, torch.float32) for backend in ("native", "reference"))
    for a, b, e in zip(native, loop, expected, strict=True):
        assert (a - e).abs().max() <= 3 * (b - e).abs().max() + 2e-5 * e.abs().max()


def test_the_gradient_where_eps_bounds_the_normaliser_is_that_of_the_loop():
    """Inputs so small against the maximum that n . q is of the order of EPS."""
    given = inputs(T=90, spread=0.1)
    given[0] = given[0] * 1e-6
    given[3] = given[3] + 12.0
    expected = run(given, "reference", torch.float64)
    for a, e in zip(run(given, "native", torch.float32), expected, strict=True):
        torch.testing.assert_close(a.double() / e.abs().max(), e / e.abs().max(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", range(5))
def test_a_bad_value_leaves_earlier_outputs_alone(position, value):
    given = [x.float() for x in inputs(T=100)]
    expected, _ = mlstm(*given, backend="native")
    given[position][:, 70] = value
    h, _ = mlstm(*given, backend="native")
    torch.testing.assert_close(h[:, :70], expected[:, :70])


def test_packed_sequences_and_parts_of_one_tensor_take_the_same_way():
    given, bounds = inputs(B=1, T=150, V=12), torch.tensor([0, 70, 70, 150])
    expected = run(given, "reference", torch.float64, cu_seqlens=bounds)
    assert_near(run(given, "native", torch.float32, cu_seqlens=bounds), expected, 2e-5)
    q, k, v, i, f = (x.float() for x in given)
    h, _ = mlstm_joined(torch.stack([q, k, v], 2), i, f, backend="native")
    assert torch.equal(h, mlstm(q, k, v, i, f, backend="native")[0])


def test_auto_takes_it_on_a_cpu_and_float64_is_refused_by_name():
    given = inputs(T=70)
    floats = [x.float() for x in given]
    assert torch.equal(mlstm(*floats)[0], mlstm(*floats, backend="native")[0])
    with pytest.raises(UserError, match="float64 is not offered there"):
        mlstm(*given, backend="native")


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # of torch.compile itself
def test_it_compiles_to_one_graph():
    floats = [x.float() for x in inputs(T=70)]
    torch._dynamo.reset()
    h, _ = torch.compile(mlstm, backend="eager", fullgraph=True)(*floats)
    torch.testing.assert_close(h, mlstm(*floats)[0])
