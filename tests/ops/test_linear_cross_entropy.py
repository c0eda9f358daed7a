"""The loss of a linear read-out: every backend is the reference's function, whatever its chunks."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.ops.linear_cross_entropy import chunked, linear_cross_entropy
from statetrack.ops.linear_cross_entropy.by_chunks import chunk_rows
from statetrack.ops.linear_cross_entropy.triton import backend as triton_backend

BACKENDS = ("chunked", "triton")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of 128 rows, and blocks of 256 logits, so that small inputs need several of both."""
    monkeypatch.setattr(chunked, "MAX_LOGITS", 1)
    monkeypatch.setattr(triton_backend, "MAX_LOGITS", 1)
    monkeypatch.setattr(triton_backend, "MAX_BLOCK", 256)


def inputs(rows=150, classes=700, D=24, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + classes)
    x = torch.randn(rows, D, generator=generator).to(dtype)
    weight = torch.randn(classes, D, generator=generator).to(dtype)
    targets = torch.randint(classes, (rows,), generator=generator)
    return x, weight, torch.where(torch.arange(rows) % 3 == 1, -100, targets)


def outcome(x, weight, targets, **options):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = linear_cross_entropy(x, weight, targets, **options)
    (0.5 * loss).backward()
    return loss.detach(), x.grad, weight.grad


def relative_error(ours, exact):
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "classes"), [(1, 3), (129, 256), (150, 700)])
def test_backends_match_float64(backend, rows, classes):
    x, weight, targets = inputs(rows, classes)
    exact = outcome(x.double(), weight.double(), targets, backend="reference")
    for ours, wanted in zip(outcome(x, weight, targets, backend=backend), exact, strict=True):
        assert ours.dtype == torch.float32
        assert relative_error(ours, wanted) < 2e-6


def test_the_chunked_backend_keeps_float64():
    x, weight, targets = inputs(dtype=torch.float64)
    exact = outcome(x, weight, targets, backend="reference")
    for ours, wanted in zip(outcome(x, weight, targets, backend="chunked"), exact, strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_takes_float32_sums(backend):
    x, weight, targets = inputs(dtype=torch.float16)
    loss, dx, dweight = outcome(x, weight / 4, targets, backend=backend)
    exact = outcome(x.double(), weight.double() / 4, targets, backend="reference")
    assert (loss.dtype, dx.dtype, dweight.dtype) == (torch.float32, torch.float16, torch.float16)
    assert relative_error(loss, exact[0]) < 1e-4  # logits are rounded to half precision
    assert relative_error(dx, exact[1]) < 1e-3
    assert relative_error(dweight, exact[2]) < 1e-3


def test_under_autocast_a_float32_weight_has_a_float32_gradient():
    x, weight, targets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss, dx, dweight = outcome(x, weight, targets, backend="chunked")
    rounded = x.bfloat16().double(), weight.bfloat16().double(), targets
    exact = outcome(*rounded, backend="reference")
    assert (loss.dtype, dx.dtype, dweight.dtype) == (torch.float32,) * 3
    assert relative_error(loss, exact[0]) < 1e-3
    assert relative_error(dx, exact[1]) < 1e-2
    assert relative_error(dweight, exact[2]) < 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_computed_only_where_they_are_needed(backend):
    x, weight, targets = inputs(rows=9, classes=30)
    op = getattr(torch.ops.statetrack, f"linear_cross_entropy_{backend}")
    for wanted in ((False, False), (True, False), (False, True)):
        _, dx, dweight = op(x, weight, targets, -100, x.dtype, *wanted)
        assert (dx.numel() > 0, dweight.numel() > 0) == wanted
    frozen = linear_cross_entropy(x.requires_grad_(), weight, targets, backend=backend)
    frozen.backward()
    torch.testing.assert_close(x.grad, 2 * outcome(x.detach(), weight, targets)[1], rtol=1e-5, atol=1e-5)
    assert weight.grad is None
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, targets, backend=backend).requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_nothing_counts_loss_and_gradients_are_zero(backend):
    x, weight, targets = inputs(rows=5)
    for value in outcome(x, weight, torch.full_like(targets, -100), backend=backend):
        assert not value.any()
    for value in outcome(x[:0], weight, targets[:0], backend=backend):
        assert not value.any()


def test_a_target_that_is_no_class_is_not_a_number():
    x, weight, targets = inputs(rows=5, classes=11)
    targets[0] = 11
    assert linear_cross_entropy(x, weight, targets, backend="triton").isnan()
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(x, weight, targets, backend="chunked")


@pytest.mark.parametrize("backend", BACKENDS)
def test_axes_in_front_and_other_integers_are_taken(backend):
    x, weight, targets = inputs(rows=12, classes=30)
    ours = outcome(x.view(3, 4, -1), weight, targets.view(3, 4).int(), backend=backend)
    theirs = outcome(x, weight, targets, backend="reference")
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(ours[1].flatten(0, 1), theirs[1])


def test_a_backward_may_be_repeated():
    x, weight, targets = inputs(rows=5, classes=30)
    loss = linear_cross_entropy(x, weight.requires_grad_(), targets, backend="chunked")
    first = torch.autograd.grad(loss, weight, 3 * torch.ones(()), retain_graph=True)[0]
    torch.testing.assert_close(3 * torch.autograd.grad(loss, weight)[0], first)


@pytest.mark.parametrize(
    ("rows", "classes", "limit", "expected"),
    [(32_768, 32_000, 2**27, 4096), (1, 32_000, 2**24, 128), (0, 10, 2**24, 128), (1000, 100, 50_000, 384)],
)
def test_chunks_are_equal_and_bounded(rows, classes, limit, expected):
    assert chunk_rows(rows, classes, limit) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_op_passes_the_checks_of_torch_library(backend):
    x, weight, targets = inputs(rows=3, classes=11)
    op = getattr(torch.ops.statetrack, f"linear_cross_entropy_{backend}").default
    torch.library.opcheck(op, (x, weight, targets, -100, torch.float32, True, False))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_it_compiles_into_one_graph():
    x, weight, targets = inputs(rows=9, classes=30)
    loss = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    ours = x.clone().requires_grad_()
    loss(ours, weight, targets, backend="chunked").backward()
    torch.testing.assert_close(ours.grad, 2 * outcome(x, weight, targets)[1])


def test_second_derivatives_are_refused():
    x, weight, targets = inputs(rows=3, classes=11)
    loss = linear_cross_entropy(x.requires_grad_(), weight, targets, backend="chunked")
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_wrong_inputs_are_explained():
    x, weight, targets = inputs(rows=3, classes=11)
    with pytest.raises(UserError, match="targets has shape"):
        linear_cross_entropy(x, weight, targets[:2])
    with pytest.raises(UserError, match="expected whole numbers"):
        linear_cross_entropy(x, weight, targets.float())
    with pytest.raises(UserError, match="expected \\(classes, 24\\)"):
        linear_cross_entropy(x, weight.T, targets)
    with pytest.raises(UserError, match="expected one dtype"):
        linear_cross_entropy(x.half(), weight, targets)


@pytest.mark.parametrize("size", [1e4, 1e8])
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_large_logits_keep_their_differences(backend, size):
    x = torch.ones(1, 1)
    weight = torch.tensor([[size], [size], [size - 1000.0]], requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.tensor([0]), backend=backend)
    torch.testing.assert_close(loss, torch.tensor(2.0).log())
    (gradient,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(gradient, torch.tensor([[-0.5], [0.5], [0.0]]))
