"""Parts of one product, convolved and activated in one pass: all backends agree, with every gradient."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from statetrack.errors import UserError
from statetrack.ops.native import library
from statetrack.ops.short_convolution import convolved_split, short_convolution
from statetrack.ops.short_convolution.triton import backend as triton_backend

built = pytest.mark.skipif(library.ABSENT is not None, reason="the native library was not built")
KERNELS = ["triton", pytest.param("native", marks=built)]


def inputs(B=2, T=9, N=48, widths=(16, 16, 8, 4), width=4, bias=False, dtype=torch.float32):
    """x, and per convolved part weights and, where asked for, a bias; `width` 0 is for no weights."""
    generator = torch.Generator().manual_seed(N)
    x = 2 * torch.randn(B, T, N, generator=generator).to(dtype)
    weights = [torch.randn(c, width, generator=generator) for c in widths[:-1]] if width else []
    biases = [torch.randn(c, generator=generator) for c in widths[:-1]] if bias else []
    return x, widths, weights, biases


def outcome(given, backend, dtype=None, **packing):
    """The parts and every gradient for a fixed random loss."""
    x, widths, weights, biases = given
    x, *parameters = (y.to(dtype).detach().requires_grad_() for y in (x, *weights, *biases))
    n = len(weights)
    parts = convolved_split(x, widths, parameters[:n], parameters[n:], backend=backend, **packing)
    generator = torch.Generator().manual_seed(1)
    sum((y.float() * torch.randn(y.shape, generator=generator)).sum() for y in parts).backward()
    return [*(y.detach() for y in parts), x.grad, *(p.grad for p in parameters)]


SHAPES = {
    "three parts": {},
    "biases": {"bias": True},
    "one part": {"widths": (24, 24), "bias": True},
    "odd sizes": {"T": 13, "N": 99, "widths": (7, 50, 3, 1), "width": 3},
    "more columns than a program has": {"T": 5, "N": 340, "widths": (130, 33, 160, 7)},
    "one step": {"T": 1, "B": 3},
    "fewer steps than taps": {"T": 2, "bias": True},
    "one tap": {"width": 1},
    "many taps": {"width": 8, "T": 11},
    "cut along time": {"B": 1, "T": 139, "bias": True},
    "several sequences to a program": {"B": 23, "T": 5},
    "no weights": {"width": 0},
    "no weights, odd sizes": {"width": 0, "T": 33, "N": 99, "widths": (7, 50, 3, 1)},
    "no weights, cut along time": {"width": 0, "B": 1, "T": 70},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 2e-2)])
def test_triton_matches_the_reference(shape, dtype, tolerance):
    x, *rest = inputs(**SHAPES[shape], dtype=dtype)
    ours = outcome((x, *rest), "triton")
    theirs = outcome((x.float(), *rest), "reference")
    parts = len(SHAPES[shape].get("widths", (0,) * 4))
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.dtype == (dtype if i <= parts else torch.float32)
        assert a.is_contiguous()
        torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("silu", [(False, False, True), (True, False, False), (False, False, False)])
@pytest.mark.parametrize("shape", [{}, {"width": 0}, {"width": 0, "N": 99, "widths": (7, 50, 3, 1)}])
def test_parts_may_go_without_their_silu(silu, shape, kernels):
    x, widths, weights, _ = given = inputs(**shape)
    ours, theirs = (outcome(given, backend, silu=silu) for backend in (kernels, "reference"))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    parts = x.split([*widths, x.shape[-1] - sum(widths)], dim=-1)
    for i, wanted in enumerate(silu):
        plain = short_convolution(parts[i], weights[i]) if weights else parts[i]
        torch.testing.assert_close(theirs[i], F.silu(plain) if wanted else plain)


PACKED = {
    "mixed": ([0, 5, 6, 13, 15], 7, {}),
    "empty ones": ([0, 0, 4, 4, 4, 15, 15], 11, {"bias": True}),
    "no bound": ([0, 3, 15], None, {}),
    "a wide bound": ([0, 3, 15], 40, {}),
    "cut along time": ([0, 2, 75, 75, 139], 80, {"bias": True}),
    "one": ([0, 70], 70, {"width": 8}),
    "several to a program": (list(range(0, 62, 2)), 2, {"widths": (24, 24)}),
    "no weights": ([0, 5, 6, 13, 15], 7, {"width": 0}),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", PACKED)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_packed_sequences_each_begin_from_an_empty_past(case, integers, kernels):
    bounds, longest, shape = PACKED[case]
    x, *rest = given = inputs(B=1, T=bounds[-1], **shape)
    packing = {"cu_seqlens": torch.tensor(bounds, dtype=integers), "max_seqlen": longest}
    ours, theirs = (outcome(given, backend, **packing) for backend in (kernels, "reference"))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    widths, weights, biases = rest
    for a, b in itertools.pairwise(bounds):
        if a < b:
            alone = convolved_split(x[:, a:b], widths, weights, biases)
            torch.testing.assert_close([y[:, a:b] for y in theirs[: len(widths)]], list(alone))


@pytest.mark.parametrize("kernels", KERNELS)
def test_packed_halves(kernels):
    x, *rest = inputs(B=1, T=31, dtype=torch.float16)
    packing = {"cu_seqlens": torch.tensor([0, 9, 9, 11, 31]), "max_seqlen": 20}
    ours = outcome((x, *rest), kernels, **packing)
    theirs = outcome((x.float(), *rest), "reference", **packing)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2e-2, atol=2e-2)


def test_it_is_a_short_convolution_of_each_part():
    x, widths, weights, biases = inputs(bias=True)
    *parts, rest = x.split([*widths, 4], dim=-1)[:-1]
    each = zip(parts, weights, biases, strict=True)
    expected = [short_convolution(part, w, b, silu=True) for part, w, b in each]
    torch.testing.assert_close(convolved_split(x, widths, weights, biases), (*expected, rest))
    torch.testing.assert_close(convolved_split(x, widths), (*(F.silu(part) for part in parts), rest))


def test_work_is_cut_up_so_that_every_processor_has_some():
    plan, size = triton_backend.partition, triton_backend.LIGHT
    assert plan(1024, 39, 3, size, 132).pieces == 1
    for B, T, blocks in ((1024, 39, 3), (8, 2048, 16), (1, 32_768, 16), (1, 1, 1), (3, 77, 2)):
        pieces, length, items, programs = plan(B, T, blocks, size, 132)
        assert (pieces - 1) * length < T <= pieces * length
        assert length % size.steps == 0
        assert items == B * pieces
        assert programs <= items
        assert blocks * programs <= size.programs * 132
        if B * T * blocks > 100_000:
            assert blocks * programs > size.programs * 132 / 2


def test_no_program_has_much_more_than_its_share():
    for size in (triton_backend.LIGHT, triton_backend.HEAVY):
        for B, T, blocks in ((16, 2048, 24), (8, 2048, 16), (64, 512, 3), (100, 300, 5)):
            work = triton_backend.partition(B, T, blocks, size, 132)
            longest = -(-work.items // work.programs) * work.length
            assert longest <= 1.25 * B * T / min(work.items, size.programs * 132 // blocks)


def test_rows_that_do_not_lie_evenly_are_copied():
    x, widths, weights, biases = inputs(B=4)
    uneven = torch.cat([x, x], dim=1)[:, : x.shape[1]]
    assert uneven.stride(0) != x.stride(0)
    for a, b in zip(
        outcome((uneven, widths, weights, biases), "triton"),
        outcome((x, widths, weights, biases), "reference"),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("width", "bounds"), [(4, None), (0, None), (4, [0, 2, 9])])
def test_the_ops_pass_the_checks_of_torch_library(width, bounds):
    x, widths, weights, biases = inputs(B=2 if bounds is None else 1, width=width, bias=width > 0)
    packing = None if bounds is None else torch.tensor(bounds), 9
    options = *packing, list(widths[:-1]), widths[-1], [True] * 3
    checks = "test_schema", "test_faketensor"
    ops = torch.ops.statetrack
    parts = ops.convolved_split(x, weights, biases, *options)
    torch.library.opcheck(ops.convolved_split.default, (x, weights, biases, *options), test_utils=checks)
    torch.library.opcheck(
        ops.convolved_split_backward.default, (x, weights, biases, parts, *options), test_utils=checks
    )


def test_second_derivatives_are_refused():
    x, widths, weights, _ = inputs()
    x.requires_grad_()
    out = convolved_split(x, widths, weights, backend="triton")[0]
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(out.square().sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widths": (16, 16, 16, 1)}, "of at most all columns together"),
        ({"x": torch.ones(3, 48)}, "expected \\(batch, time, columns\\)"),
        ({"weights": [torch.ones(16, 4)]}, "1 weights and 0 biases"),
        ({"weights": [torch.ones(16, 4), torch.ones(16, 4), torch.ones(8, 3)]}, "weights\\[2\\] has shape"),
        ({"biases": [torch.ones(16), torch.ones(16), torch.ones(4)]}, "biases\\[2\\] has shape"),
        ({"widths": (8,) * 5, "weights": (), "backend": "triton"}, "4 convolved parts, more than 3"),
        ({"silu": (True, False)}, "silu has 2 entries"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "need batch 1, got 2"),
        (
            {"x": torch.ones(1, 9, 48), "cu_seqlens": torch.tensor([0, 3, 2, 9])},
            "that rise from 0 to time = 9",
        ),
        ({"x": torch.ones(1, 9, 48), "cu_seqlens": torch.tensor([0.0, 9.0])}, "offsets in int32 or int64"),
        (
            {"x": torch.ones(1, 9, 48), "cu_seqlens": torch.tensor([0, 9]), "max_seqlen": 8},
            "a sequence has 9 steps, more than max_seqlen = 8",
        ),
    ],
)
def test_wrong_inputs_are_explained(change, message):
    x, widths, weights, _ = inputs()
    given = {"x": x, "widths": widths, "weights": weights} | change
    with pytest.raises(UserError, match=message):
        convolved_split(**given)
