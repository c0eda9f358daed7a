"""The compiled network as an nn.Module on the library's own delta rule."""

import random
import re

import machines
import pytest
import torch
from torch.nn import functional as F

from statetrack.automata import DFA, compile_dfa
from statetrack.errors import UserError
from statetrack.ops.checks import checked


def expected_states(dfa: DFA, tokens: torch.Tensor) -> torch.Tensor:
    return torch.tensor([dfa.run([dfa.alphabet[i] for i in row])[1:] for row in tokens.tolist()])


def random_tokens(dfa: DFA, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(dfa.alphabet), (batch, length), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("strategy", ["excluded", "holonomy", "auto"])
def test_module_tracks_random_automata(strategy, dtype):
    rng = random.Random(11)
    for trial in range(20):
        dfa = machines.random_dfa(rng, most_states=6)
        tokens = random_tokens(dfa, 3, 130, seed=trial)
        module = compile_dfa(dfa, strategy, dtype).to_module()
        assert torch.equal(module.states(tokens), expected_states(dfa, tokens)), trial


@pytest.mark.parametrize("keys", ["exact", "unit"])
@pytest.mark.parametrize("strategy", ["group", "cyclic", "reflections"])
def test_module_adds_modulo_m(strategy, keys):
    for m in (2, 3, 8, 31):
        dfa = machines.adder(m, 0, 1, m - 1) if m > 2 else machines.adder(m, 0, 1)
        tokens = random_tokens(dfa, 2, 200)
        module = compile_dfa(dfa, strategy).to_module(keys=keys)
        assert torch.equal(module.states(tokens), expected_states(dfa, tokens)), m


def test_backends_agree():
    dfa = DFA.from_regex("(ab|ba)*", "ab")
    tokens = random_tokens(dfa, 2, 50)
    network = compile_dfa(dfa)
    logits = [network.to_module(backend=backend)(tokens) for backend in ("reference", "chunked")]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keys", ["exact", "unit"])
def test_s5_is_tracked_over_100_000_tokens(keys):
    dfa = DFA.from_permutations(machines.symmetric(5))
    tokens = random_tokens(dfa, 1, 100_000)
    module = compile_dfa(dfa).to_module(keys=keys)
    assert module.levels[0].householders == 4
    assert torch.equal(module.states(tokens), expected_states(dfa, tokens))


def test_a_group_is_tracked_on_its_smallest_degree():
    dfa = machines.word_problem(machines.symmetric(4))
    tokens = random_tokens(dfa, 2, 300)
    module = compile_dfa(dfa, "group", representation="smallest").to_module()
    assert module.levels[0].size == 4
    assert torch.equal(module.states(tokens), expected_states(dfa, tokens))


def test_a_cascade_of_two_levels_holds_over_20_000_tokens():
    dfa = machines.SECOND_TO_LAST_B
    tokens = random_tokens(dfa, 1, 20_000)
    module = compile_dfa(dfa, "holonomy", torch.float16).to_module()
    assert torch.equal(module.states(tokens), expected_states(dfa, tokens))
    assert module.accepts(tokens).tolist() == [dfa.accepts([dfa.alphabet[i] for i in tokens[0].tolist()])]


def test_unreachable_states_keep_their_numbers():
    dfa = DFA("ab", {"a": [0, 3, 2, 1, 1], "b": [0, 1, 4, 3, 1]}, start=1, accepting=[3])
    tokens = random_tokens(dfa, 2, 30)
    module = compile_dfa(dfa, "excluded").to_module()
    assert module(tokens).shape == (2, 30, 5)
    assert torch.equal(module.states(tokens), expected_states(dfa, tokens))


def test_one_state_and_no_token_are_words_too():
    constant = compile_dfa(DFA("a", {"a": [0]}, 0, [0])).to_module()
    assert constant.states(torch.zeros(2, 3, dtype=torch.long)).tolist() == [[0] * 3] * 2
    module = compile_dfa(machines.adder(3, 1)).to_module()
    assert module(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 3)


def test_state_dict_carries_the_machine_over(tmp_path):
    dfa = DFA.from_regex("(ab|ba)*a?", "ab")
    network = compile_dfa(dfa)
    network.states("abba")  # numbers some symbols early, in another order than a fresh network would
    module, fresh = network.to_module(), compile_dfa(dfa).to_module()
    torch.save(module.state_dict(), tmp_path / "machine.pt")
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    fresh.load_state_dict(torch.load(tmp_path / "machine.pt", weights_only=True))
    tokens = random_tokens(dfa, 2, 60)
    assert torch.equal(fresh(tokens), module(tokens))
    assert torch.equal(fresh.states(tokens), expected_states(dfa, tokens))


def test_a_disturbed_machine_is_fine_tuned_back():
    torch.manual_seed(0)
    dfa = DFA.from_permutations(machines.symmetric(3))
    module = compile_dfa(dfa).to_module()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.25 * torch.randn_like(parameter))
    tokens = random_tokens(dfa, 16, 12)
    labels = expected_states(dfa, tokens)
    optimiser = torch.optim.Adam(module.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss = F.cross_entropy(4 * module(tokens).flatten(0, 1), labels.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
    assert all(p.grad is not None for p in module.parameters())


def test_every_level_of_a_cascade_can_be_trained_by_its_own_scores():
    module = compile_dfa(machines.SECOND_TO_LAST_B, "excluded").to_module()
    scores = module.levels_of(random_tokens(machines.SECOND_TO_LAST_B, 2, 20))
    assert [s.shape for s in scores] == [(2, 20, 4), (2, 20, 3), (2, 20, 2)]
    sum(s.square().sum() for s in scores).backward()
    assert all(level.keys.grad.abs().sum() > 0 for level in module.levels)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: m(torch.tensor([[0, 7]])), "outside 0 to 1"),
        (lambda m: m(torch.tensor([0, 1])), "shape (2,)"),
        (lambda m: m(torch.zeros(1, 2)), "expected whole numbers"),
        (lambda m: compile_dfa(machines.SECOND_TO_LAST_B).to_module(keys="units"), "Did you mean 'unit'?"),
    ],
)
def test_mistakes_are_named(make, words):
    with pytest.raises(UserError, match=re.escape(words)):
        make(compile_dfa(machines.SECOND_TO_LAST_B).to_module())


def test_a_cascade_too_large_to_tabulate_says_so():
    rng, n = random.Random(0), 40
    dfa = DFA("ab", {"a": [rng.randrange(n) for _ in range(n)], "b": [(q + 1) % n for q in range(n)]}, 0, [0])
    with pytest.raises(UserError, match="tabulates as it goes"):
        compile_dfa(dfa, "excluded").to_module()


def test_unit_keys_pass_the_checked_mode_of_the_op():
    dfa = DFA.from_regex("(aa|b)*", "ab")
    tokens = random_tokens(dfa, 1, 40)
    with checked():
        states = compile_dfa(dfa, "excluded").to_module(keys="unit").states(tokens)
    assert torch.equal(states, expected_states(dfa, tokens))


def test_the_empty_word_is_accepted_or_not():
    empty = torch.zeros(2, 0, dtype=torch.long)
    assert compile_dfa(DFA.from_regex("(ab)*", "ab")).to_module().accepts(empty).tolist() == [True, True]
    assert compile_dfa(DFA.from_regex("(ab)+", "ab")).to_module().accepts(empty).tolist() == [False, False]
