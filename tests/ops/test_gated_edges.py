"""Gated linear attention at the edges of its contract, on all backends: growth, bad values, no values."""

import pytest
import torch
from test_gated_linear_attention import GATES, random_inputs, run

from statetrack.ops.gated_linear_attention import gated_linear_attention
from statetrack.ops.native import library

absent = pytest.mark.skipif(library.ABSENT is not None, reason="the native library was not built")
FAST = ["chunked", pytest.param("native", marks=absent)]
ALL = ["reference", *FAST]


def rounded(inputs):
    return [None if x is None else x.detach().float().requires_grad_() for x in inputs]


@pytest.mark.parametrize("kind", ["channel", "head"])
@pytest.mark.parametrize("backend", FAST)
def test_gates_beyond_one_are_computed_as_defined(backend, kind):
    """A state that grows by up to 1.3 a step and changes its sign, over more than a chunk."""
    exact = random_inputs(70, kind, B=1)
    with torch.no_grad():
        exact[3].copy_(torch.where(exact[3] < 0, -1.3, 1.1))
    results = []
    for inputs, name in ((exact, "reference"), (rounded(exact), backend)):
        o, S = run(inputs, name)
        loss = (o * torch.arange(o.numel()).view(o.shape).cos()).sum() + S.sum()
        results.append([o, S, *torch.autograd.grad(loss, [x for x in inputs if x is not None])])
    assert results[0][1].abs().max() > 1000
    for x, y in zip(*results, strict=True):
        assert (y.double() - x).abs().max() <= 1e-5 * x.abs().max()


@pytest.mark.parametrize("backend", FAST)
def test_a_positive_logarithm_is_computed_as_defined(backend):
    q, k, v, a, _, _ = (None if x is None else x.detach() for x in random_inputs(70))
    expected, _ = gated_linear_attention(q, k, v, 0.2 * a.abs(), sign=a.sign(), backend="reference")
    given = [x.float() for x in (q, k, v, 0.2 * a.abs())]
    actual, _ = gated_linear_attention(*given, sign=a.sign().float(), backend=backend)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "k", "v", "a", "angle"])
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("backend", ALL)
def test_a_bad_value_leaves_earlier_outputs_alone(backend, kind, name, value):
    for offsets in (None, torch.tensor([0, 5, 40])):
        inputs = [None if x is None else x.detach() for x in rounded(random_inputs(40, kind, B=1, N=1))]
        inputs[5] = None
        place = ["q", "k", "v", "a", "angle"].index(name)
        if inputs[place] is None:
            return
        expected, _ = run(inputs, backend, cu_seqlens=offsets)
        inputs[place][:, 21, :1, ...] = value
        o, _ = run(inputs, backend, cu_seqlens=offsets)
        torch.testing.assert_close(o[:, :21], expected[:, :21], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(o[:, :, 1:], expected[:, :, 1:], rtol=1e-5, atol=1e-6)
        assert not o[:, 21, 0].isfinite().all(), "and what it does spoil is seen"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", ALL)
def test_a_bad_angle_leaves_the_other_packed_sequences_alone(backend, value):
    q, k, v, a, angle, _ = (x.detach() for x in rounded(random_inputs(40, "head turned", B=1)))
    bounds = torch.tensor([0, 5, 5, 25, 40])
    expected, _ = run([q, k, v, a, angle, None], backend, cu_seqlens=bounds)
    angle[:, 7] = value
    o, S = run([q, k, v, a, angle, None], backend, cu_seqlens=bounds)
    outside = [*range(7), *range(25, 40)]
    torch.testing.assert_close(o[:, outside], expected[:, outside], rtol=1e-5, atol=1e-6)
    assert not o[:, 7].isfinite().all()
    assert S[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("backend", FAST)
def test_a_bad_value_leaves_other_columns_alone(backend):
    inputs = [None if x is None else x.detach() for x in rounded(random_inputs(40, B=1))]
    inputs[2][:, 3, :, 0] = float("nan")
    o, _ = run(inputs, backend)
    assert o[:, 3:, :, 0].isnan().all()
    assert o[..., 1:].isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
def test_the_meta_device_gives_shapes(backend):
    inputs = [x.detach().to("meta") for x in random_inputs(40, "channel turned")]
    o, S = run(inputs, backend)
    assert (o.shape, S.shape) == ((2, 40, 2, 3), (2, 2, 4, 3))
