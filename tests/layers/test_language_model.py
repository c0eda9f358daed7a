"""What language models ask of the backbone: a loss without logits, a tied head, recomputed activations."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from statetrack.errors import UserError
from statetrack.layers import build
from statetrack.layers.fusion import fused
from statetrack.layers.mixer import Packing
from statetrack.training.half_weights import HalfWeights
from statetrack.training.optimizer import decayed_names

TOKENS = torch.randint(7, (2, 11), generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(7, (2, 11), generator=torch.Generator().manual_seed(1))


def small(name="deltanet", **changes):
    torch.manual_seed(0)
    return build(name, vocab_size=7, **{"d_model": 16, "layers": 2} | changes)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def assert_equal_gradients(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        torch.testing.assert_close(
            grad, expected[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


# The loss


@pytest.mark.parametrize("choice", [None, False, True], ids=["default", "unfused", "fused"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_is_the_summed_cross_entropy_of_the_logits(tied, choice):
    targets = TARGETS.masked_fill(TARGETS == 3, -100)
    results = []
    for with_targets in (True, False):
        model = small(tied=tied)
        with fused(choice):
            if with_targets:
                loss, states = model(TOKENS, targets=targets)
            else:
                logits, states = model(TOKENS)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        results.append((loss.detach(), gradients(model), states[0].S))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][2], results[1][2])
    assert_equal_gradients(results[0][1], results[1][1], rtol=1e-4, atol=1e-5)


class LowRank(nn.Linear):
    """A linear map with a second one beside it, as LoRA adds it."""

    def forward(self, x):
        return super().forward(x) + x @ self.extra


def add_low_rank(model):
    weight = model.head.weight
    model.head = LowRank(16, 7, bias=False)
    model.head.weight = weight
    model.head.extra = nn.Parameter(torch.randn(16, 7))


def add_bias(model):
    weight = model.head.weight
    model.head = nn.Linear(16, 7)
    model.head.weight = weight


@pytest.mark.parametrize(
    "change",
    [
        add_low_rank,
        add_bias,
        lambda model: model.head.register_forward_hook(lambda module, inputs, output: 2 * output),
        lambda model: nn.utils.parametrizations.weight_norm(model.head),
    ],
    ids=["low rank", "bias", "hook", "parametrised"],
)
def test_the_loss_takes_the_head_as_it_is(change):
    model = small()
    change(model)
    logits, _ = model(TOKENS)
    loss, _ = model(TOKENS, targets=TARGETS)
    expected = F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(p.grad is not None for p in model.head.parameters())


def test_the_loss_of_some_positions_is_that_of_their_targets():
    model, at = small(), torch.tensor([[0, 10], [4, 9]])
    logits, _ = model(TOKENS, at=at)
    targets = torch.tensor([[1, -100], [6, 2]])
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(model(TOKENS, at=at, targets=targets)[0], expected)
    with pytest.raises(UserError, match=r"targets has shape \(2, 11\), expected .* = \(2, 2\)"):
        model(TOKENS, at=at, targets=TARGETS)


def test_no_tokens_have_no_loss():
    model = small(tied=True)
    _, states = model(TOKENS)
    loss, same = model(TOKENS[:, :0], states, targets=TARGETS[:, :0])
    loss.backward()
    assert loss == 0.0
    assert all(a is b for a, b in zip(same, states, strict=True))


# A tied head


def test_a_tied_table_is_one_parameter_with_the_gradient_of_both_uses():
    tied, untied = small(tied=True), small()
    untied.load_state_dict(tied.state_dict() | {"head.weight": tied.embedding.weight})
    for model in (tied, untied):
        model(TOKENS, targets=TARGETS)[0].backward()
    names = {name for name, _ in tied.named_parameters()}
    assert {name for name, _ in untied.named_parameters()} - names == {"head.weight"}
    both = untied.embedding.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, both)


def test_a_tied_table_is_stored_once_and_loaded_into_both_places():
    model, other = small(tied=True), small(tied=True, d_model=16)
    nn.init.normal_(model.embedding.weight)
    state = model.state_dict()
    assert "head.weight" not in state
    other.load_state_dict(state)
    assert other.head.weight is other.embedding.weight
    torch.testing.assert_close(other.head.weight, model.embedding.weight)
    other.load_state_dict(state | {"head.weight": state["embedding.weight"].clone()})


def test_weights_of_an_untied_model_do_not_pass_for_tied_ones():
    with pytest.raises(RuntimeError, match=r"head\.weight differs from embedding\.weight, expected"):
        small(tied=True).load_state_dict(small().state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*head.weight"):
        small().load_state_dict(small(tied=True).state_dict())


def test_a_tied_model_inside_another_module_is_stored_once_too():
    outer, other = nn.Sequential(small(tied=True)), nn.Sequential(small(tied=True))
    assert "0.head.weight" not in outer.state_dict()
    other.load_state_dict(outer.state_dict())


def test_a_tied_head_is_not_decayed_as_embeddings_are_not():
    assert {"embedding.weight", "head.weight"}.isdisjoint(decayed_names(small(tied=True)))
    assert "head.weight" in decayed_names(small())


@pytest.mark.parametrize("choice", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_copies_give_the_loss_and_gradients_of_autocast(tied, choice):
    """The gradient of a weight is its copy's; a tied weight has no copy, and both parts in its own."""
    plain, copied = small(tied=tied), small(tied=tied)
    run = HalfWeights(copied)
    assert ("head.weight" in run.copies) == (not tied)
    losses = []
    for model in (plain, run):
        with torch.autocast("cpu", torch.bfloat16), fused(choice):
            loss, _ = model(TOKENS, targets=TARGETS)
        loss.backward()
        losses.append(loss)
    assert losses[0] == losses[1]
    named, copies = dict(copied.named_parameters()), run.copies
    found = {name: copies[name].grad.float() if name in copies else p.grad for name, p in named.items()}
    assert_equal_gradients(found, gradients(plain), rtol=0, atol=0)


# Activation checkpointing


@pytest.mark.parametrize("choice", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize(
    ("name", "changes"), [("deltanet", {}), ("mamba", {}), ("deltanet", {"attention_every": 2, "tied": True})]
)
@pytest.mark.parametrize("packed", [False, True])
def test_recomputed_activations_give_the_same_gradients(name, changes, packed, choice):
    tokens, targets, options = TOKENS, TARGETS, {}
    if packed:
        tokens, targets = TOKENS.flatten()[None], TARGETS.flatten()[None]
        options = {"packing": Packing(torch.tensor([0, 3, 4, 22]), 18)}
    results = []
    for recompute in (False, True):
        model = small(name, **changes)
        model.checkpoint_activations = recompute
        with fused(choice):
            loss, _ = model(tokens, targets=targets, **options)
            loss.backward()
        results.append((loss.detach(), gradients(model)))
    assert results[0][0] == results[1][0]
    assert_equal_gradients(results[1][1], results[0][1], rtol=0, atol=0)


def test_recomputed_blocks_read_the_bfloat16_copies_they_read_before():
    """In the backward pass the copies are no longer in the place of the weights, here of other values."""
    results = []
    for recompute in (False, True):
        model = small()
        model.checkpoint_activations = recompute
        run = HalfWeights(model)
        for copy in run.copies.values():
            copy.data *= 1.5
        with torch.autocast("cpu", torch.bfloat16), fused(True):
            loss, _ = run(TOKENS, targets=TARGETS)
            loss.backward()
        assert all(copy.grad is not None for copy in run.copies.values())
        results.append({name: copy.grad for name, copy in run.copies.items()} | gradients(model))
    assert_equal_gradients(results[1], results[0], rtol=0, atol=0)


def saved_bytes(model):
    """The memory of all tensors that a forward pass keeps for its backward pass, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss, _ = model(TOKENS.repeat(4, 4), targets=TARGETS.repeat(4, 4))
    return sum(kept.values()), loss


@pytest.mark.parametrize("name", ["deltanet", "mamba", "transformer"])
def test_recomputed_blocks_keep_their_inputs_only(name):
    model = small(name, layers=4)
    everything, _ = saved_bytes(model)
    model.checkpoint_activations = True
    inputs, loss = saved_bytes(model)
    stream = 8 * 44 * 16 * 4  # bytes of x (B, T, d_model) in float32
    # x and y of every block, and what the head and its loss keep: at most three of x's size and the logits
    assert inputs <= (2 * 4 + 3) * stream + 2 * 8 * 44 * 7 * 4 + 4 * 8 * 44 * 8
    assert everything > 3 * inputs
    assert torch.isfinite(loss)


def test_nothing_is_recomputed_without_gradients():
    model = small()
    model.checkpoint_activations = True
    with torch.no_grad():
        logits, states = model(TOKENS)
    model.checkpoint_activations = False
    assert not logits.requires_grad
    torch.testing.assert_close(logits, model(TOKENS)[0])
    assert states[0].S.grad_fn is None
