"""mLSTM and sLSTM: the fast forms against the step-by-step definitions, values and gradients."""

import itertools

import pytest
import torch

from statetrack.errors import UserError
from statetrack.ops.checks import checked
from statetrack.ops.mlstm import mlstm
from statetrack.ops.native import library
from statetrack.ops.slstm import slstm


def mlstm_inputs(T, B=2, H=2, K=3, V=5, spread=2.0, dtype=torch.float64):
    g = torch.Generator().manual_seed(T)
    q, k = (torch.randn(B, T, H, K, generator=g, dtype=dtype) for _ in range(2))
    v = torch.randn(B, T, H, V, generator=g, dtype=dtype)
    i, f = (spread * torch.randn(B, T, H, generator=g, dtype=dtype) for _ in range(2))
    return [x.requires_grad_() for x in (q, k, v, i, f + 2)]


def slstm_inputs(T, B=2, H=2, D=3, spread=2.0, dtype=torch.float64):
    g = torch.Generator().manual_seed(T)
    x = spread * torch.randn(B, T, H, 4, D, generator=g, dtype=dtype)
    R = torch.randn(H, D, 4 * D, generator=g, dtype=dtype)
    return [x.requires_grad_(), R.requires_grad_()]


OPS = {"mlstm": (mlstm, mlstm_inputs), "slstm": (slstm, slstm_inputs)}
TIME_AXIS = {"mlstm": 5, "slstm": 1}  # so many of the inputs run along time


def pieces(name, inputs, start, stop):
    """The inputs of a stretch of time."""
    along = TIME_AXIS[name]
    return [x[:, start:stop] for x in inputs[:along]] + inputs[along:]


def loss(y, cell):
    """Depends on every output and on the last state in a way that the stabiliser m leaves alone."""
    C, _, m = cell[-3:]
    for _ in range(C.ndim - m.ndim):
        m = m[..., None]
    return (y * torch.cos(torch.arange(y.numel()).view(y.shape))).sum() + (C * m.exp()).sin().sum()


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 150])
@pytest.mark.parametrize("name", OPS)
def test_fast_form_matches_the_reference_with_all_gradients(name, T):
    op, make = OPS[name]
    inputs = make(T)
    results = {}
    for backend in ("reference", "chunked"):
        y, cell = op(*inputs, backend=backend)
        results[backend] = [y, *cell, *torch.autograd.grad(y.cos().sum(), inputs)]
    for actual, expected in zip(results["chunked"], results["reference"], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("name", OPS)
def test_pieces_with_carried_state_equal_one_pass_with_all_gradients(name, backend):
    op, make = OPS[name]
    inputs = make(70)
    y, cell = op(*inputs, backend=backend)
    expected = [y, *torch.autograd.grad(loss(y, cell), inputs)]
    outputs, cell = [], None
    for start, stop in ((0, 1), (1, 2), (2, 68), (68, 70)):
        y, cell = op(*pieces(name, inputs, start, stop), initial_state=cell, backend=backend)
        outputs.append(y)
    y = torch.cat(outputs, 1)
    actual = [y, *torch.autograd.grad(loss(y, cell), inputs)]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("name", OPS)
def test_gradients_are_those_of_finite_differences(name, backend):
    op, make = OPS[name]
    inputs = make(4, B=1, spread=0.5)
    assert torch.autograd.gradcheck(lambda *x: op(*x, backend=backend)[0], inputs)


def test_mlstm_is_the_unstabilised_recurrence():
    q, k, v, i, f = mlstm_inputs(20, spread=0.5)
    h, _ = mlstm(q, k, v, i, f)
    C, n = torch.zeros(2, 2, 3, 5), torch.zeros(2, 2, 3)
    for t in range(20):
        forget, write = torch.sigmoid(f[:, t, :, None]), torch.exp(i[:, t, :, None]) / 3**0.5
        C = forget[..., None] * C + (write * k[:, t])[..., None] * v[:, t, :, None, :]
        n = forget * n + write * k[:, t]
        scale = (n * q[:, t]).sum(-1, keepdim=True).abs().clamp(min=1)
        expected = torch.einsum("bhkv,bhk->bhv", C, q[:, t]) / scale
        torch.testing.assert_close(h[:, t], expected, rtol=1e-5, atol=1e-5)  # eps of the normaliser


@pytest.mark.parametrize("spread", [50.0, 500.0])
@pytest.mark.parametrize("name", OPS)
def test_extreme_gates_stay_finite_in_float32(name, spread):
    op, make = OPS[name]
    inputs = [x.detach().requires_grad_() for x in make(500, spread=spread, dtype=torch.float32)]
    y, _ = op(*inputs)
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(x.grad).all() for x in inputs)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("name", OPS)
def test_no_steps_return_no_outputs_and_the_state(name, backend):
    op, make = OPS[name]
    inputs = make(3)
    _, cell = op(*inputs, backend=backend)
    y, last = op(*pieces(name, inputs, 0, 0), initial_state=cell, backend=backend)
    assert y.shape[1] == 0
    assert all(torch.equal(a, b) for a, b in zip(last, cell, strict=True))
    y, last = op(*pieces(name, inputs, 0, 0), backend=backend)
    assert y.shape[1] == 0
    assert last.m.isneginf().all()


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("name", OPS)
def test_gradients_flow_through_every_part_of_the_state(name, backend):
    """Also the raw c, n and m, which hold the stabiliser: of both ends, by finite differences."""
    op, make = OPS[name]
    inputs = [x.detach() for x in make(3, B=1, H=1)]
    _, cell = op(*[x.detach() for x in make(4, B=1, H=1)])
    leaves = [x.requires_grad_() for x in (*inputs, *cell)]
    for shift in (0.0, 5.0):  # of the first m: with 5 it stays the largest exponent, with 0 it does not

        def run(*x, shift=shift):
            state = type(cell)(*x[len(inputs) : -1], x[-1] + shift)
            y, last = op(*x[: len(inputs)], initial_state=state, backend=backend)
            return y, *last

        assert torch.autograd.gradcheck(run, leaves)


def test_closed_forget_gates_cost_no_digits_of_open_ones():
    """Logits that spread by 80: sums of log sigmoid(f) reach the thousands within a chunk."""
    inputs = [x.detach() for x in mlstm_inputs(60, B=4)]
    g = torch.Generator().manual_seed(0)
    inputs[4] = torch.where(torch.rand(inputs[4].shape, generator=g) < 0.5, -80.0, 2.0).double()
    exact, _ = mlstm(*inputs, backend="reference")
    y, _ = mlstm(*(x.float() for x in inputs), backend="chunked")
    reference, _ = mlstm(*(x.float() for x in inputs), backend="reference")
    assert (y - exact).abs().max() < 2 * (reference - exact).abs().max() + 1e-6


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("name", OPS)
def test_a_state_of_another_batch_is_refused_and_not_broadcast(name, backend):
    op, make = OPS[name]
    _, cell = op(*make(3, B=1))
    with pytest.raises(UserError, match=r"initial_state.*has shape.*one state for every sequence"):
        op(*make(3, B=2), initial_state=cell, backend=backend)
    with pytest.raises(UserError, match="initial_state is a Tensor"):
        op(*make(3, B=1), initial_state=cell[0], backend=backend)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_bad_value_of_the_mlstm_leaves_earlier_outputs_alone(backend, signed, value):
    """70 steps, more than a chunk; the other sequence of the batch does not change either."""
    for place in range(5):
        inputs = [x.detach() for x in mlstm_inputs(70)]
        expected, _ = mlstm(*inputs, signed=signed, backend=backend)
        inputs[place][0, 21] = value
        h, _ = mlstm(*inputs, signed=signed, backend=backend)
        torch.testing.assert_close(h[0, :21], expected[0, :21])
        torch.testing.assert_close(h[1], expected[1])
        assert not torch.equal(h[0, 21:], expected[0, 21:]), "and what it changes is seen"


@pytest.mark.parametrize("value", [-1e7, -1e30, -float("inf")])
@pytest.mark.parametrize("backend", ["reference", "chunked", "native"])
def test_a_closed_forget_gate_of_the_mlstm_starts_anew(backend, value):
    """What comes after it is as if nothing had been before, to the last digits."""
    inputs = [x.detach() for x in mlstm_inputs(70)]
    if backend == "native":
        if library.ABSENT is not None:
            pytest.skip("the native library was not built")
        inputs = [x.float() for x in inputs]
    inputs[4][:, 21] = value
    h, _ = mlstm(*inputs, backend=backend)
    alone, _ = mlstm(*(x[:, 21:] for x in inputs), backend=backend)
    torch.testing.assert_close(h[:, 21:], alone)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_bad_value_of_the_slstm_leaves_earlier_outputs_alone(backend, value):
    x, R = (x.detach() for x in slstm_inputs(12))
    expected, _ = slstm(x, R, backend=backend)
    for gate in range(4):
        bad = x.clone()
        bad[0, 7, :, gate] = value
        h, _ = slstm(bad, R, backend=backend)
        torch.testing.assert_close(h[0, :7], expected[0, :7])
        torch.testing.assert_close(h[1], expected[1])


def test_wrong_shapes_are_refused_by_name():
    q, k, v, i, f = mlstm_inputs(4)
    with pytest.raises(UserError, match=r"mlstm: f has shape \(2, 2, 4\), expected \(batch, time, heads\)"):
        mlstm(q, k, v, i, f.transpose(1, 2))
    with pytest.raises(UserError, match="expected four axes"):
        mlstm(q[0], k, v, i, f)
    x, R = slstm_inputs(4)
    with pytest.raises(UserError, match="slstm: R has shape"):
        slstm(x, R.mT)
    with pytest.raises(UserError, match="4 gates"):
        slstm(x.transpose(2, 3), R)
    with pytest.raises(UserError, match="reference"):
        slstm(x, R, backend="native")


def test_checked_mode_refuses_nan():
    x, R = slstm_inputs(4)
    with checked(), pytest.raises(UserError, match="x holds NaN"):
        slstm(x * float("nan"), R)


# Signed forget gates


def signed_inputs(T, B=2, H=2, K=3, V=5, spread=2.0, dtype=torch.float64):
    """Gates of both signs, among them one of exactly 0."""
    q, k, v, i, f = (x.detach() for x in mlstm_inputs(T, B, H, K, V, spread, dtype))
    f = f - 2
    f[:, T // 2] = 0.0
    return [x.requires_grad_() for x in (q, k, v, i, f)]


def unstabilised(q, k, v, i, f, gate=lambda f: 2 * torch.sigmoid(f) - 1):
    """The signed mLSTM as its equations read, without m: every step a matrix, in float64."""
    (B, T, H, K), V = q.shape, v.shape[-1]
    C, n, outputs = q.new_zeros(B, H, K, V), q.new_zeros(B, H, K), []
    for t in range(T):
        a, write = gate(f[:, t, :, None]), torch.exp(i[:, t, :, None]) / K**0.5
        C = a[..., None] * C + (write * k[:, t])[..., None] * v[:, t, :, None, :]
        n = a * n + write * k[:, t]
        scale = (n * q[:, t]).sum(-1, keepdim=True).abs().clamp(min=1)
        outputs.append(torch.einsum("bhkv,bhk->bhv", C, q[:, t]) / scale)
    return torch.stack(outputs, dim=1), C, n


@pytest.mark.parametrize("T", [1, 64, 65, 150])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_signed_mlstm_is_the_recurrence_with_gates_of_both_signs_with_all_gradients(backend, T):
    inputs = signed_inputs(T, spread=1.0)
    h, cell = mlstm(*inputs, signed=True, backend=backend)
    expected, C, n = unstabilised(*inputs)
    scale = cell.m.exp()[..., None]
    torch.testing.assert_close((scale[..., None] * cell.C, scale * cell.n), (C, n))
    # the eps of the normaliser, 1e-6 beside exp(-m), is not in the equations
    torch.testing.assert_close(h, expected, rtol=1e-4, atol=1e-4)
    for actual, gradient in zip(
        torch.autograd.grad((h.cos() * 0.1).sum(), inputs),
        torch.autograd.grad((expected.cos() * 0.1).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(actual, gradient, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("T", [1, 64, 65, 150])
def test_signed_backends_agree_with_all_gradients(T):
    inputs, results = signed_inputs(T), {}
    for backend in ("reference", "chunked"):
        h, cell = mlstm(*inputs, signed=True, backend=backend)
        results[backend] = [h, *cell, *torch.autograd.grad(loss(h, cell), inputs)]
    for actual, expected in zip(results["chunked"], results["reference"], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_signed_pieces_with_carried_state_equal_one_pass_with_all_gradients(backend):
    inputs = signed_inputs(70)
    h, cell = mlstm(*inputs, signed=True, backend=backend)
    expected = [h, *torch.autograd.grad(loss(h, cell), inputs)]
    outputs, cell = [], None
    for start, stop in ((0, 1), (1, 2), (2, 68), (68, 70)):
        part = pieces("mlstm", inputs, start, stop)
        h, cell = mlstm(*part, signed=True, initial_state=cell, backend=backend)
        outputs.append(h)
    h = torch.cat(outputs, 1)
    for a, e in zip([h, *torch.autograd.grad(loss(h, cell), inputs)], expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("spread", [50.0, 500.0])
def test_extreme_signed_gates_stay_finite_in_float32(backend, spread):
    inputs = signed_inputs(300, spread=spread, dtype=torch.float32)
    h, _ = mlstm(*inputs, signed=True, backend=backend)
    h.sum().backward()
    assert torch.isfinite(h).all()
    assert all(torch.isfinite(x.grad).all() for x in inputs)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_the_sign_of_the_memory_survives_the_normaliser(backend):
    """One value written once and flipped by every later step: h changes its sign, n . q only its size."""
    T = 40
    i = torch.full((1, T, 1), -40.0, dtype=torch.float64)
    i[:, 0] = 3.0
    ones = torch.ones(1, T, 1, 1, dtype=torch.float64)
    f = torch.full((1, T, 1), -40.0, dtype=torch.float64)
    h, _ = mlstm(ones, ones, ones, i, f, signed=True, backend=backend)
    flips = (-1.0) ** torch.arange(T, dtype=torch.float64)
    torch.testing.assert_close(h.flatten(), flips, rtol=1e-4, atol=1e-4)


BOUNDS = [0, 5, 5, 6, 75, 75]


def packed_call(name, inputs, state, **options):
    """The op on the packed row; and one call per sequence, joined, without those of no steps."""
    op, along = OPS[name][0], TIME_AXIS[name]
    row = [x.flatten(0, 1)[None, : BOUNDS[-1]] for x in inputs[:along]] + inputs[along:]
    packed = op(*row, initial_state=state, cu_seqlens=torch.tensor(BOUNDS), **options)
    outputs, cells = [], []
    for s, (a, b) in enumerate(itertools.pairwise(BOUNDS)):
        before = None if state is None else type(state)(*(x[s : s + 1] for x in state))
        y, cell = op(*pieces(name, row, a, b), initial_state=before, **options)
        outputs.append(y)
        cells.append(cell)
    joined = [torch.cat(parts) for parts in zip(*cells, strict=True)]
    return packed, (torch.cat(outputs, dim=1), type(cells[0])(*joined))


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("name", ["mlstm", "signed mlstm", "slstm"])
def test_packed_sequences_come_out_as_if_each_were_alone(name, carried, backend):
    """One sequence of one step, one longer than a chunk, and two of none; with states in and out."""
    options = {"backend": backend} | ({"signed": True} if name == "signed mlstm" else {})
    name = name.removeprefix("signed ")
    op, make = OPS[name]
    inputs, state = make(75), None
    if carried:
        before = [x[:1].expand(5, *x.shape[1:]) for x in make(4)[: TIME_AXIS[name]]] + inputs[
            TIME_AXIS[name] :
        ]
        _, state = op(*before, **options)
        state = type(state)(*(x.detach().requires_grad_() for x in state))
        inputs = [*inputs, *state]
    actual, expected = packed_call(name, inputs[: len(make(1))], state, **options)
    for a, e in zip((actual[0], *actual[1]), (expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-8, atol=1e-9)

    def gradients(result):
        y, cell = result
        return torch.autograd.grad(
            y.cos().sum() + cell[0].sin().sum() + cell[1].cos().sum(), inputs, allow_unused=True
        )

    for a, e in zip(gradients(actual), gradients(expected), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", OPS)
def test_packed_sequences_in_half_precision_have_finite_gates_at_their_padding(name):
    op, make = OPS[name]
    inputs = [x.detach().to(torch.float16) for x in make(13, B=1)]
    bounds = torch.tensor([0, 4, 13])
    y, cell = op(*inputs, cu_seqlens=bounds, max_seqlen=11)
    expected, last = op(*pieces(name, inputs, 4, 13))
    assert y.dtype == torch.float16
    torch.testing.assert_close(y[:, 4:], expected, rtol=1e-2, atol=1e-2)
    for a, e in zip(cell, last, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a[1:], e, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", OPS)
def test_packings_that_do_not_fit_are_refused(name):
    op, make = OPS[name]
    inputs, bounds = make(6, B=1), torch.tensor([0, 2, 6])
    for given, message in (
        ({"cu_seqlens": bounds[:2]}, "expected offsets that rise from 0 to time = 6"),
        ({"cu_seqlens": bounds, "max_seqlen": 3}, "a sequence has 4 steps, more than max_seqlen = 3"),
        ({"max_seqlen": 6}, "only with cu_seqlens"),
    ):
        with pytest.raises(UserError, match=message):
            op(*inputs, **given)
    with pytest.raises(UserError, match="need batch 1, got 2"):
        op(*make(6), cu_seqlens=bounds)
    _, state = op(*make(3))
    with pytest.raises(UserError, match="initial_state"):
        op(*inputs, cu_seqlens=torch.tensor([0, 1, 2, 6]), initial_state=state)
