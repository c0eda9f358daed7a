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


def test_where_nothing_counts_the_loss_is_not_a_number_and_the_gradient_zero():
    logits, targets = inputs(rows=5)
    for backend in ("reference", "triton"):
        loss, dlogits = outcome(logits, torch.full_like(targets, -100), backend=backend)
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
    torch.library.opcheck(op, (logits.requires_grad_(), targets, -100))


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
    with pytest.raises(UserError, match="more than 1024"):
        cross_entropy(torch.ones(3, 1025), targets, backend="triton")
