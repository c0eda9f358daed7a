"""The delta rule on convolved inputs: what is computed again in the backward pass changes no gradient."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.convolved_delta_rule import convolved_delta_rule
from statetrack.ops.convolved_delta_rule.shapes import Shapes
from statetrack.ops.convolved_delta_rule.triton import backend as triton_backend

SHAPES = Shapes(H=1, K=40, V=24, householders=1)  # keys of more than 32 numbers go by chunks of 32 steps
NARROW = Shapes(H=2, K=16, V=16, householders=1)  # one kernel for a short sequence


def inputs(T, shapes=SHAPES, B=1):
    generator = torch.Generator().manual_seed(T)
    columns = sum(shapes.widths)
    x = torch.randn(B, T, columns + 3, generator=generator)
    return x, [0.5 * torch.randn(width, 4, generator=generator) for width in shapes.widths[:3]]


def outcome(x, weights, shapes=SHAPES, **options):
    x, weights = x.clone().requires_grad_(), [w.clone().requires_grad_() for w in weights]
    options = {"beta_from_logits": 2.0, "householders": shapes.householders} | options
    out, state = convolved_delta_rule(x, weights, shapes.H, shapes.K, shapes.V, **options)
    generator = torch.Generator().manual_seed(1)
    loss = (out * torch.randn(out.shape, generator=generator)).sum()
    if state is not None:
        loss = loss + (state * torch.randn(state.shape, generator=generator)).sum()
    loss.backward()
    return [out.detach(), x.grad, *(w.grad for w in weights)], state


def assert_same(x, weights, shapes=SHAPES, **options):
    ours, state = outcome(x, weights, shapes, backend="triton", **options)
    theirs, expected = outcome(x, weights, shapes, backend="reference", **options)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert (state is None) == (expected is None)
    if state is not None:
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shapes", [SHAPES, NARROW])
@pytest.mark.parametrize("output_final_state", [True, False])
def test_triton_matches_one_op_after_the_other(shapes, output_final_state):
    assert_same(*inputs(40, shapes), shapes, output_final_state=output_final_state)


@pytest.mark.parametrize("shapes", [SHAPES, NARROW])
def test_hard_betas_are_taken(shapes):
    x, weights = inputs(40, shapes)
    assert_same(4 * x, weights, shapes, hard_beta=True)


def test_chunks_may_keep_their_inverses(monkeypatch):
    monkeypatch.setattr(triton_backend, "KEEP_INVERSES", True)
    assert_same(*inputs(40))


def test_householders_and_columns_without_activation_are_taken():
    shapes = SHAPES._replace(householders=2)
    assert_same(*inputs(20, shapes), shapes, silu=(False, False, True))


def test_packed_sequences_are_taken():
    bounds = torch.tensor([0, 3, 40])
    assert_same(*inputs(40), cu_seqlens=bounds, max_seqlen=37)


def test_only_the_product_and_what_chunks_leave_is_kept():
    x, weights = inputs(40)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda z: kept.append(tuple(z.shape)) or z, lambda z: z):
        convolved_delta_rule(x.requires_grad_(), weights, 1, 40, 24, beta_from_logits=2.0, backend="triton")
    heads = [shape for shape in kept if len(shape) == 4]
    # norms, errors E and states of two chunks of 32 steps, no pairs of chunks; no q, k, v, inverse or A
    assert sorted(heads) == [(0, 1, 32, 32), (1, 40, 1, 24), (2, 1, 2, 32), (2, 1, 40, 24)]
    assert tuple(x.shape) in kept


def test_values_are_checked_between_the_ops():
    x, weights = inputs(5)
    x[0, 0, 0] = float("nan")
    with checks.checked(), pytest.raises(UserError, match="NaN"):
        convolved_delta_rule(x, weights, 1, 40, 24, beta_from_logits=2.0)


def test_what_the_kernels_cannot_take_is_explained():
    x, weights = inputs(5)
    with pytest.raises(UserError, match="float64"):
        convolved_delta_rule(x.double(), weights, 1, 40, 24, beta_from_logits=2.0, backend="triton")
    wide = Shapes(1, 300, 16, 1)
    x, weights = inputs(5, wide)
    with pytest.raises(UserError, match="more than 256"):
        convolved_delta_rule(x, weights, *wide[:3], beta_from_logits=2.0, backend="triton")
