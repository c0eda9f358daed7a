"""Cross-entropy: both backends are PyTorch's function, forward and gradient."""

import pytest
import torch
import torch.nn.functional as F

from statetrack.errors import UserError
from statetrack.ops.cross_entropy import cross_entropy


def inputs(rows=33, classes=121, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + classes)
    logits = 4 * torch.randn(rows, classes, generator=generator).to(dtype)
    targets = torch.randint(classes, (rows,), generator=generator)
    return logits, torch.where(torch.arange(rows) % 3 == 1, -100, targets)


def outcome(logits, targets, **options):
    logits = logits.clone().requires_grad_()
    loss = cross_entropy(logits, targets, **options)
    (3 * loss).backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize(("rows", "classes"), [(1, 3), (3, 11), (33, 121), (200, 11), (5, 1000)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-3)])
def test_triton_matches_pytorch(rows, classes, dtype, tolerance):
    logits, targets = inputs(rows, classes, dtype)
    loss, dlogits = outcome(logits, targets, backend="triton")
    wide = logits.float().requires_grad_()
    expected = F.cross_entropy(wide, targets)
    (3 * expected).backward()
    assert (loss.dtype, dlogits.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dlogits.float(), wide.grad, rtol=tolerance, atol=tolerance)


def test_sums_of_many_programs_are_added(monkeypatch):
    from statetrack.ops.cross_entropy.triton import backend as triton_backend

    monkeypatch.setattr(triton_backend, "BLOCK", 16)
    logits, targets = inputs(rows=19 * 16, classes=121)
    for a, b in zip(outcome(logits, targets, backend="triton"), outcome(logits, targets), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_triton_takes_axes_in_front_and_padded_rows():
    logits, targets = inputs(rows=12, classes=121)
    padded = F.pad(logits, (0, 7))[:, :121].unflatten(0, (3, 4))
    ours = outcome(padded, targets.unflatten(0, (3, 4)), backend="triton")
    theirs = outcome(logits, targets, backend="reference")
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(ours[1].flatten(0, 1), theirs[1])


BACKENDS = ["reference", "triton"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_centred_gradient_sums_to_zero_where_the_softmax_rounds_to_one(backend):
    """Of 8 classes one has a logit 20 above the others: p = 1 - 7 e^-20 is 1 in float32, and p - 1 is 0."""
    logits, targets = torch.zeros(3, 8), torch.tensor([0, 0, 5])
    logits[:, 0] = 20.0
    for centred in (False, True):
        _, gradient = outcome(logits, targets, centred=centred, backend=backend)
        rows = gradient[:2].double()  # the third row is wrong, and has no small numbers
        relative = rows.sum(-1).abs() / rows.abs().sum(-1)
        assert (relative < 1e-6).all() if centred else (relative > 0.9).all()
    wide = logits.double().requires_grad_()
    (3 * F.cross_entropy(wide, targets)).backward()
    torch.testing.assert_close(gradient.double(), wide.grad, rtol=1e-5, atol=0)


def test_a_centred_gradient_in_half_precision_is_off_by_the_rounding_of_one_number():
    logits, targets = inputs(rows=12, classes=121, dtype=torch.float16)
    targets = targets.clamp(min=0)
    _, gradient = outcome(logits, targets, centred=True, backend="triton")
    own = gradient.gather(1, targets[:, None])[:, 0]
    others = own.float() - gradient.float().sum(-1)
    torch.testing.assert_close(own, others.to(torch.float16), rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("centred", [False, True])
def test_z_loss_adds_the_square_of_the_log_of_the_sum(backend, centred):
    logits, targets = inputs()
    loss, gradient = outcome(logits, targets, centred=centred, z_loss=0.3, backend=backend)
    wide = logits.double().requires_grad_()
    counts = targets != -100
    square = wide[counts].exp().sum(-1).log().square().mean()
    expected = F.cross_entropy(wide, targets) + 0.3 * square
    (3 * expected).backward()
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient.double(), wide.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("rows", "classes"), [(33, 121), (3, 11)])
def test_label_smoothing_is_that_of_pytorch(backend, centred, rows, classes):
    logits, targets = inputs(rows, classes)
    loss, gradient = outcome(logits, targets, centred=centred, smoothing=0.2, backend=backend)
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, targets, label_smoothing=0.2)
    (3 * expected).backward()
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient.double(), wide.grad, rtol=1e-4, atol=1e-6)


def test_where_nothing_counts_the_loss_is_not_a_number_and_the_gradient_zero():
    logits, targets = inputs(rows=5)
    for backend in BACKENDS:
        for options in ({}, {"centred": True, "z_loss": 0.1, "smoothing": 0.1}):
            loss, dlogits = outcome(logits, torch.full_like(targets, -100), backend=backend, **options)
            assert loss.isnan()
            assert not dlogits.any()


def test_a_target_that_is_no_class_is_not_a_number():
    logits, targets = inputs(rows=5, classes=11)
    targets[0] = 11
    assert cross_entropy(logits, targets, backend="triton").isnan()


def test_the_op_passes_the_checks_of_torch_library():
    from statetrack.ops.cross_entropy.triton import backend as triton_backend  # noqa: F401

    logits, targets = inputs(rows=3, classes=11)
    op = torch.ops.statetrack.cross_entropy.default
    torch.library.opcheck(op, (logits.requires_grad_(), targets, -100, True, 0.1, 0.2))


def test_second_derivatives_are_refused():
    logits, targets = inputs(rows=3, classes=11)
    loss = cross_entropy(logits.requires_grad_(), targets, backend="triton")
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_wrong_inputs_are_explained():
    logits, targets = inputs(rows=3, classes=11)
    with pytest.raises(UserError, match="targets has shape"):
        cross_entropy(logits, targets[:2])
    with pytest.raises(UserError, match="expected whole numbers"):
        cross_entropy(logits, targets.float())
    with pytest.raises(UserError, match=r"z_loss is -1.0, expected 0"):
        cross_entropy(logits, targets, z_loss=-1.0)
    with pytest.raises(UserError, match="smoothing is 1, expected at least 0"):
        cross_entropy(logits, targets, smoothing=1)
    with pytest.raises(UserError, match="more than 1024"):
        cross_entropy(torch.ones(3, 1025), targets, backend="triton")


@pytest.mark.parametrize("size", [1e4, 1e6, 1e8])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_large_logits_keep_their_differences(backend, size):
    logits = torch.tensor([[size, size, size - 1000.0]])
    loss, gradient = outcome(logits, torch.tensor([0]), backend=backend)
    torch.testing.assert_close(loss, torch.tensor(2.0).log())
    torch.testing.assert_close(gradient, torch.tensor([[-1.5, 1.5, 0.0]]))
