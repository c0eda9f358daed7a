"""The short convolution: all backends are one function, forward and every gradient."""

import pytest
import torch
import torch.nn.functional as F

from statetrack.errors import UserError
from statetrack.ops.native import library
from statetrack.ops.short_convolution import short_convolution

built = pytest.mark.skipif(library.ABSENT is not None, reason="the native library was not built")
KERNELS = ["triton", pytest.param("native", marks=built)]


def inputs(B=2, T=21, C=70, width=4, bias=True, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, T, C, generator=generator).to(dtype)
    weight = torch.randn(C, width, generator=generator)
    return [x, weight, torch.randn(C, generator=generator) if bias else None]


def outcome(given, **options):
    """The output and every gradient for a fixed random loss."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in given]
    y = short_convolution(*leaves, **options)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    (y.float() * weights).sum().backward()
    return [y.detach()] + [x.grad for x in leaves if x is not None]


def test_each_output_is_a_sum_over_the_last_values():
    x, weight, bias = inputs(T=9)
    y = short_convolution(x, weight, bias, backend="reference")
    for t in range(9):
        expected = bias + sum(weight[:, i] * x[:, t - 3 + i] for i in range(4) if t - 3 + i >= 0)
        torch.testing.assert_close(y[:, t], expected)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("shape", [{}, {"T": 1}, {"T": 2, "bias": False}, {"T": 77, "C": 3, "width": 3}])
def test_kernels_match_the_reference(shape, silu, backend):
    given = inputs(**shape)
    for ours, theirs in zip(
        outcome(given, silu=silu, backend=backend),
        outcome(given, silu=silu, backend="reference"),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", KERNELS)
def test_kernels_take_half_precision_and_strided_views(backend):
    wide = torch.randn(2, 20, 140).half()
    given = [wide[..., 70:], *inputs()[1:]]
    ours = outcome(given, silu=True, backend=backend)
    theirs = outcome([given[0].float(), *given[1:]], silu=True, backend="reference")
    assert ours[0].dtype == torch.float16
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("backend", KERNELS)
def test_single_steps_are_read_where_they_lie(backend):
    """An axis of size one may have any stride, and PyTorch still calls the whole contiguous."""
    _, weight, bias = inputs()
    x = torch.randn(1, 5, 70).transpose(0, 1)
    assert x.is_contiguous()
    assert x.stride() == (70, 350, 1)
    ours, theirs = (short_convolution(x, weight, bias, backend=name) for name in (backend, "reference"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packing", [{}, {"cu_seqlens": torch.tensor([0, 0]), "max_seqlen": 0}])
def test_of_no_steps_nothing_comes_out(packing):
    x, weight, bias = inputs(B=1, T=0)
    assert short_convolution(x, weight, bias, silu=True, **packing).shape == (1, 0, 70)


def test_two_halves_with_the_carried_past_are_one_pass():
    x, weight, bias = inputs()
    whole = short_convolution(x, weight, bias, silu=True)
    first = short_convolution(x[:, :10], weight, bias, silu=True)
    second = short_convolution(x[:, 10:], weight, bias, silu=True, initial_state=x[:, 7:10].mT)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)


@pytest.mark.parametrize("backend", KERNELS)
def test_packed_sequences_each_begin_from_an_empty_past(backend):
    given, packing = inputs(B=1), {"cu_seqlens": torch.tensor([0, 4, 4, 21]), "max_seqlen": 17}
    ours, theirs = (outcome(given, silu=True, backend=name, **packing) for name in (backend, "reference"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    x, weight, bias = given
    pieces = [short_convolution(x[:, :4], weight, bias, silu=True)]
    pieces.append(short_convolution(x[:, 4:], weight, bias, silu=True))
    torch.testing.assert_close(theirs[0], torch.cat(pieces, dim=1))


def test_second_derivatives_are_refused():
    x, weight, bias = (y.requires_grad_() for y in inputs(T=5, C=8))
    y = short_convolution(x, weight, bias, backend="triton")
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3, 4)}, "expected \\(batch, time, channels\\)"),
        ({"weight": torch.ones(5, 4)}, "weight has shape"),
        ({"initial_state": torch.ones(2, 70, 4), "backend": "reference"}, "initial_state has shape"),
        ({"initial_state": torch.ones(2, 70, 3), "backend": "triton"}, "there is an initial state"),
        (
            {
                "x": torch.ones(1, 21, 70),
                "initial_state": torch.ones(1, 70, 3),
                "cu_seqlens": torch.tensor([0, 21]),
            },
            "start from zeros and take no initial_state",
        ),
    ],
)
def test_wrong_inputs_are_explained(change, message):
    x, weight, bias = inputs()
    given = {"x": x, "weight": weight, "bias": bias} | change
    with pytest.raises(UserError, match=message):
        short_convolution(**given)


def test_silu_of_the_sum_is_the_silu_of_pytorch():
    x, weight, bias = inputs()
    torch.testing.assert_close(
        short_convolution(x, weight, bias, silu=True), F.silu(short_convolution(x, weight, bias))
    )


@pytest.mark.parametrize("bias", [False, True])
def test_a_step_of_decoding_is_the_last_step_of_the_whole(bias):
    x, weight = torch.randn(3, 9, 6), torch.randn(6, 4)
    bias = torch.randn(6) if bias else None
    whole = short_convolution(x, weight, bias, silu=True, backend="reference")
    with torch.no_grad():
        step = short_convolution(
            x[:, -1:], weight, bias, silu=True, initial_state=x[:, -4:-1].mT, backend="reference"
        )
    torch.testing.assert_close(step, whole[:, -1:])


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [{}, {"T": 1}, {"T": 2, "bias": False}, {"T": 77, "C": 3, "width": 7}])
def test_without_gradients_the_result_is_the_same(shape, dtype, backend):
    """Without gradients a sum over taps takes the place of conv1d in the reference, on a CPU."""
    x, weight, bias = (y if y is None else y.to(dtype) for y in inputs(**shape))
    before = x.clone()
    for packing in ({}, {"cu_seqlens": torch.tensor([0, 1, x.shape[1]])}):
        rows = x[:1] if packing else x
        options = {"silu": True, "backend": backend, **packing}
        expected = short_convolution(rows.clone().requires_grad_(), weight, bias, **options)
        with torch.no_grad():
            y = short_convolution(rows, weight, bias, **options)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected.detach())
    assert torch.equal(x, before)


def test_without_gradients_autocast_has_its_own_dtype():
    x, weight, bias = inputs()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert short_convolution(x, weight, bias).dtype == torch.bfloat16
