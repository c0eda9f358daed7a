"""The native short convolution against a loop in float64: results, every gradient, layouts, compilation."""

import itertools
import time

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from statetrack.errors import UserError
from statetrack.ops.native import library
from statetrack.ops.short_convolution import convolved_split, short_convolution
from statetrack.ops.short_convolution.native import MAX_WIDTH, ROWS

pytestmark = pytest.mark.skipif(library.ABSENT is not None, reason="the native library was not built")


def random_inputs(B=2, T=21, C=70, width=4, bias=True, seed=0):
    """x, weight and bias in float64, of numbers that float32 holds."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, T, C), (C, width), (C,)
    x, weight, offset = (torch.randn(shape, generator=generator).double() for shape in shapes)
    return [x, weight, offset if bias else None]


def loop(x, weight, bias, silu, bounds):
    """The equation step by step, for every sequence between the bounds, in the dtype of x."""
    y = []
    for first, end in itertools.pairwise(bounds):
        for t in range(first, end):
            taken = range(max(first, t - weight.shape[1] + 1), t + 1)
            y.append(sum(weight[:, i - t - 1] * x[:, i] for i in taken) + (0 if bias is None else bias))
    y = torch.stack(y, 1)
    return F.silu(y) if silu else y


def with_gradients(function, inputs, dtype=torch.float64, **options):
    """The output, and the gradients of all inputs for a fixed random gradient of the output."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]
    y = function(*leaves, **options)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x for x in leaves if x is not None], dy)]


def native(*inputs, **options):
    return short_convolution(*inputs, backend="native", **options)


def assert_near(actual, expected, tolerance=2e-6):
    """Relative to the largest number of each tensor."""
    for x, y in zip(actual, expected, strict=True):
        assert x.shape == y.shape
        assert (x.double() - y).abs().max() <= tolerance * y.abs().max().clamp(min=1e-3)


def assert_is_the_loop(inputs, silu=True, bounds=None):
    packing = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    actual = with_gradients(native, inputs, torch.float32, silu=silu, **packing)
    bounds = [0, inputs[0].shape[1]] if bounds is None else bounds
    assert_near(actual, with_gradients(loop, inputs, silu=silu, bounds=bounds))


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", range(1, MAX_WIDTH + 1))
def test_native_is_the_loop_with_all_gradients(width, bias, silu):
    assert_is_the_loop(random_inputs(width=width, bias=bias), silu)


# rows of all sequences are cut into blocks of ROWS
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("T", [1, 2, 3, 4, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 3])
def test_lengths_around_the_size_of_a_block(T, B):
    assert_is_the_loop(random_inputs(B, T, C=5))


# columns are cut into blocks of 64, and these into vectors of 4 to 16
@pytest.mark.parametrize("C", [1, 3, 4, 15, 16, 17, 63, 64, 65, 128, 200])
def test_channels_need_not_be_multiples_of_a_vector(C):
    assert_is_the_loop(random_inputs(T=9, C=C))


@given(sizes=st.tuples(*(st.integers(1, high) for high in (4, 40, 80, MAX_WIDTH))), bias=st.booleans())
def test_native_is_the_loop_on_any_shape(sizes, bias):
    assert_is_the_loop(random_inputs(*sizes, bias))


@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize(
    "bounds",
    [
        [0, 0, 5, 5, 6, 8, 30, 30],
        [0, ROWS - 1, ROWS, ROWS + 1, ROWS + 1, 2 * ROWS],
        [0, ROWS - 2, ROWS + 2, 3 * ROWS],
        list(range(ROWS + 9)),
    ],
    ids=["empty ones", "ends at blocks", "across blocks", "single steps"],
)
def test_packed_sequences_are_those_of_the_loop(bounds, width):
    assert_is_the_loop(random_inputs(1, bounds[-1], C=20, width=width), bounds=bounds)


@given(lengths=st.lists(st.integers(0, 70), min_size=1, max_size=20).filter(any), width=st.integers(1, 8))
def test_any_packing_is_that_of_the_loop(lengths, width):
    bounds = [0, *itertools.accumulate(lengths)]
    assert_is_the_loop(random_inputs(1, bounds[-1], C=3, width=width), bounds=bounds)


@pytest.mark.parametrize("packed", [False, True])
def test_memory_layout_changes_nothing(packed):
    inputs = [x.float() for x in random_inputs(1 if packed else 3, 300)]
    packing = {"cu_seqlens": torch.tensor([0, 7, 7, 290, 300])} if packed else {}
    dy = torch.randn(inputs[0].shape)

    def results(change):
        x, weight, bias = inputs
        leaves = [change(x).requires_grad_(), weight.mT.contiguous().mT.requires_grad_(), bias]
        y = native(*leaves, silu=True, **packing)
        return [y, *torch.autograd.grad(y, leaves[:2], change(dy))]

    expected = results(torch.clone)
    for change in (
        lambda x: torch.cat([x, x, x], -1)[..., 70:140],
        lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
        lambda x: torch.stack([x, x], 2).flatten(1, 2)[:, ::2],
        lambda x: x.mT.contiguous().mT,
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.stack([x, x], -1)[..., 0],
    ):
        for actual, value in zip(results(change), expected, strict=True):
            assert torch.equal(actual, value)


def test_a_gradient_may_be_one_number_expanded():
    gradients = []
    for whole in (True, False):
        leaves = [x.float().requires_grad_() for x in random_inputs()]
        y = native(*leaves, silu=True)
        one = torch.ones_like(y) if whole else torch.ones(()).expand_as(y)
        gradients.append(torch.autograd.grad(y, leaves, one))
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_each_input_alone_may_need_a_gradient(wanted):
    inputs = [x.float() for x in random_inputs()]
    expected = with_gradients(native, inputs, torch.float32, silu=True)
    leaves = [x.requires_grad_() if i in wanted else x for i, x in enumerate(inputs)]
    y = native(*leaves, silu=True)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    for i, gradient in zip(wanted, torch.autograd.grad(y, [leaves[i] for i in wanted], dy), strict=True):
        assert torch.equal(gradient, expected[1 + i])


def test_parts_of_a_wide_x_are_convolved_where_they_lie():
    generator, widths = torch.Generator().manual_seed(0), (24, 16, 8, 4)
    x = torch.randn(2, 30, 60, generator=generator)
    parameters = [torch.randn(c, 4, generator=generator) for c in widths[:3]]
    parameters += [torch.randn(c, generator=generator) for c in widths[:3]]

    def results(backend, dtype):
        leaves = [y.to(dtype).requires_grad_() for y in (x, *parameters)]
        options = {"silu": (True, False, True), "backend": backend}
        parts = convolved_split(leaves[0], widths, leaves[1:4], leaves[4:], **options)
        return [*parts, *torch.autograd.grad(sum(y.square().sum() for y in parts), leaves)]

    assert_near(results("native", torch.float32), results("reference", torch.float64))
    plain = convolved_split(x, widths, backend="native")
    assert all(map(torch.equal, plain, convolved_split(x, widths, backend="reference")))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_nan_reaches_neither_earlier_steps_nor_other_sequences(backend):
    x, weight, bias = (y.float() for y in random_inputs(1, 40))
    x[0, 22] = torch.nan
    x.requires_grad_()
    offsets = torch.tensor([0, 10, 24, 40])
    y = short_convolution(x, weight, bias, silu=True, cu_seqlens=offsets, backend=backend)
    assert y[0].isnan().any(1).nonzero().flatten().tolist() == [22, 23]
    dy = torch.ones_like(y)
    dy[0, 12] = torch.nan
    (dx,) = torch.autograd.grad(y, x, dy)
    assert dx[0, :10].isfinite().all()
    assert dx[0, 24:].isfinite().all()
    assert dx[0, 13:19].isfinite().all()


def test_silu_and_its_gradient_are_those_of_pytorch_at_large_values():
    x = torch.cat([torch.linspace(-120, 120, 2401), torch.linspace(-1, 1, 2401)])
    expected = with_gradients(F.silu, [x])
    one = torch.ones(1, 1)
    actual = with_gradients(lambda x: native(x.view(1, -1, 1), one, silu=True).flatten(), [x], torch.float32)
    for ours, theirs in zip(actual, expected, strict=True):
        # exp(-x) moves by x times the rounding of x; numbers below 1e-37 lose their digits
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=1e-36)
        # PyTorch's SiLU in float32 is as far off: 1 - sigmoid(x) is rounded, and multiplied by x
        assert ((ours - theirs).abs() <= 1e-6 * theirs.abs().clamp(min=0.1)).all()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_halves_are_no_worse_than_in_the_reference(half):
    inputs = [x.to(half).double() for x in random_inputs(4, 40)]
    expected = with_gradients(short_convolution, inputs, silu=True, backend="reference")
    errors = []
    for backend in ("native", "reference"):
        actual = with_gradients(short_convolution, inputs, half, silu=True, backend=backend)
        assert all(x.dtype == half for x in actual)
        errors.append([(x.double() - y).abs().mean() for x, y in zip(actual, expected, strict=True)])
    assert all(ours <= 1.02 * theirs for ours, theirs in zip(*errors, strict=True))


def test_halves_beside_float32_are_computed_with_all_its_digits():
    x, weight, bias = random_inputs()
    expected = short_convolution(x, weight, bias, silu=True)
    for dtypes in itertools.product((torch.float32, torch.bfloat16), repeat=3):
        y = native(*(t.to(dtype) for t, dtype in zip((x, weight, bias), dtypes, strict=True)), silu=True)
        assert y.dtype == dtypes[0]
        assert_near([y], [expected], 2e-2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "float64 is not offered there"),
        ({"width": 9}, "it is 9 wide, more than 8"),
        ({"T": 0}, "the input is empty"),
        ({"autocast": True}, "autocast is on"),
        ({"state": True}, "there is an initial state"),
    ],
)
def test_what_it_does_not_offer_is_refused_by_name_and_served_by_auto(change, reason):
    change = dict(change)
    dtype, autocast = change.pop("dtype", torch.float32), change.pop("autocast", False)
    state = torch.zeros(2, 70, 3) if change.pop("state", False) else None
    inputs = [x.to(dtype) for x in random_inputs(**change)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with pytest.raises(UserError, match=f'"native" cannot run this: {reason}'):
            native(*inputs, initial_state=state)
        y = short_convolution(*inputs, initial_state=state)
    assert y.shape == inputs[0].shape
    assert y.dtype == (torch.bfloat16 if autocast else dtype)


def test_float64_among_the_parameters_is_left_to_the_reference():
    x, weight, bias = random_inputs()
    expected = short_convolution(x, weight, bias)
    y = short_convolution(x.float(), weight, bias.float())
    assert y.dtype == torch.float32
    assert_near([y], [expected])
    with pytest.raises(UserError, match="float64 is not offered there"):
        native(x.float(), weight, bias.float())


def test_auto_takes_it_on_a_cpu():
    x, weight, bias = (y.float().requires_grad_() for y in random_inputs())
    assert short_convolution(x, weight, bias).grad_fn.name() == "_NativeBackward"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by torch itself, when it loads forward-mode rules
def test_second_derivatives_and_torch_func_are_refused_not_wrong():
    x, weight, bias = (y.float().requires_grad_() for y in random_inputs())
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(native(x, weight, bias).sum(), x, create_graph=True)
    with pytest.raises(UserError, match=r'torch.func .*backend="reference"'):
        torch.func.jvp(lambda x: native(x, weight, bias), (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_many_packed_sequences_cost_little_more_than_one(backend):
    """2048 sequences of 4 steps, or one of 8192: by slices of the row they would cost a hundred times it."""
    x, weight, _ = (None if y is None else y.float().requires_grad_() for y in random_inputs(1, 8192, 32))

    def least(offsets):
        times = []
        for _ in range(5):
            start = time.process_time()
            y = short_convolution(x, weight, silu=True, cu_seqlens=offsets, backend=backend)
            torch.autograd.grad(y, (x, weight), torch.ones_like(y))
            times.append(time.process_time() - start)
        return min(times)

    assert least(torch.arange(0, 8193, 4)) < 6 * least(torch.tensor([0, 8192]))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch itself
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_into_one_graph(packed):
    inputs = [x.float().requires_grad_() for x in random_inputs(1, 40)]
    packing = {"cu_seqlens": torch.tensor([0, 13, 40]), "max_seqlen": 27} if packed else {}

    def op(x, weight, bias):
        return short_convolution(x, weight, bias, silu=True, **packing)

    results = []
    for function in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        y = function(*inputs)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_the_ops_keep_the_rules_of_torch_library():
    from statetrack.ops.short_convolution.native import convolution_backward, convolution_forward

    x, weight, bias = (y.float() for y in random_inputs(1))
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for given_bias, offsets in ((bias, None), (None, torch.tensor([0, 4, 21]))):
        inputs = x, weight, given_bias, offsets
        y = convolution_forward(*inputs, True)
        torch.library.opcheck(convolution_forward, (*inputs, True), test_utils=checks)
        for needed in ([True] * 3, [True, False, False], [False, True, False]):
            torch.library.opcheck(convolution_backward, (*inputs, y, True, needed), test_utils=checks)
