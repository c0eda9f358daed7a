"""The embedding: both backends are one function, forward and gradient."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.ops.embedding import embedding


def inputs(count=33, V=121, D=128, dtype=torch.float32):
    generator = torch.Generator().manual_seed(count + V + D)
    return torch.randint(V, (count,), generator=generator), torch.randn(V, D, generator=generator).to(dtype)


def outcome(tokens, weight, **options):
    weight = weight.clone().requires_grad_()
    out = embedding(tokens, weight, **options)
    (out.float() * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    return [out.detach(), weight.grad]


@pytest.mark.parametrize("count", [1, 33, 300])
@pytest.mark.parametrize(("V", "D"), [(3, 24), (11, 128), (121, 60), (140, 70)])
def test_triton_matches_the_reference(count, V, D):
    tokens, weight = inputs(count, V, D)
    for a, b in zip(
        outcome(tokens, weight, backend="triton"), outcome(tokens, weight, backend="reference"), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("V", "count"), [(5, 1), (5, 40), (1025, 33)])
def test_gradients_of_sorted_tokens_match_the_reference(monkeypatch, V, count):
    from statetrack.ops.embedding.triton import backend as triton_backend

    monkeypatch.setattr(triton_backend, "UNSORTED_VOCABULARY", 4)
    tokens, weight = inputs(count, V, 24)
    for a, b in zip(
        outcome(tokens, weight, backend="triton"), outcome(tokens, weight, backend="reference"), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_triton_takes_half_precision_and_axes_in_front():
    tokens, weight = inputs(count=30, dtype=torch.float16)
    ours = outcome(tokens.view(2, 15), weight, backend="triton")
    theirs = outcome(tokens.view(2, 15), weight.float(), backend="reference")
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float16
        torch.testing.assert_close(a.float(), b, rtol=2e-3, atol=2e-3)


def test_every_program_adds_up_its_share(monkeypatch):
    from statetrack.ops.embedding.triton import backend as triton_backend

    monkeypatch.setattr(triton_backend, "PROGRAMS_PER_PROCESSOR", 4)
    tokens, weight = inputs(count=500, V=11, D=60)
    constants, grid = triton_backend.backward_plan(500, 11, 60, processors=1)
    assert (grid, constants["BLOCKS"]) == ((4, 1, 1), 2)
    for a, b in zip(outcome(tokens, weight, backend="triton"), outcome(tokens, weight), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("processors", "programs", "blocks"), [(132, 132, 2), (28, 27, 10)])
def test_the_backward_has_up_to_one_program_per_multiprocessor(processors, programs, blocks):
    from statetrack.ops.embedding.triton import backend as triton_backend

    constants, grid = triton_backend.backward_plan(64 * 2 * 132, 11, 60, processors)
    assert (grid, constants["BLOCKS"]) == ((programs, 1, 1), blocks)


def test_a_token_outside_the_vocabulary_is_not_a_number():
    tokens, weight = inputs(count=5, V=11, D=24)
    tokens[2] = 11
    assert embedding(tokens, weight, backend="triton").isnan().any(1).tolist() == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_the_op_passes_the_checks_of_torch_library():
    from statetrack.ops.embedding.triton import backend as triton_backend  # noqa: F401

    tokens, weight = inputs(count=5, V=11, D=24)
    torch.library.opcheck(torch.ops.statetrack.embedding.default, (tokens, weight.requires_grad_()))


def test_second_derivatives_are_refused():
    tokens, weight = inputs(count=5, V=11, D=24)
    out = embedding(tokens, weight.requires_grad_(), backend="triton")
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(out.square().sum(), weight, create_graph=True)


def test_wrong_inputs_are_explained():
    tokens, weight = inputs(count=5, V=11, D=24)
    with pytest.raises(UserError, match="expected whole numbers"):
        embedding(tokens.float(), weight)
    with pytest.raises(UserError, match="expected \\(vocabulary, width\\)"):
        embedding(tokens, weight[0])
