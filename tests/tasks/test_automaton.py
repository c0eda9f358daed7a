"""Automata as tasks: labels are the automaton's states, and a spec needs no file."""

import json
import random
import time

import pytest
import torch

from statetrack.automata import DFA
from statetrack.errors import UserError
from statetrack.run import run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import Automaton, task
from statetrack.tasks.automaton import open_states
from statetrack.training import Options

EVEN = DFA("ab", {"a": [1, 0], "b": [0, 1]}, 0, [0])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_dfa(rng):
    n, alphabet = rng.randint(1, 8), "abcd"[: rng.randint(1, 4)]
    tables = {a: [rng.randrange(n) for _ in range(n)] for a in alphabet}
    return DFA(alphabet, tables, rng.randrange(n), [q for q in range(n) if rng.random() < 0.4])


def test_the_worked_example_of_the_docstring():
    batch = Automaton.of(EVEN).label(torch.tensor([[0, 1, 0, 0]]))
    assert batch.inputs.tolist() == [[2, 0, 1, 0, 0]]
    assert batch.targets.tolist() == [[0, 1, 1, 0, 1]]


@pytest.mark.parametrize("words", ["uniform", "live"])
def test_labels_are_the_states_of_a_plain_loop(words):
    rng = random.Random(3)
    for _ in range(40):
        dfa = random_dfa(rng)
        inputs, targets = Automaton.of(dfa, words).sample(5, (1, 30), generator(rng.randrange(99)))
        for tokens, labels in zip(inputs.tolist(), targets.tolist(), strict=True):
            assert tokens[0] == len(dfa.alphabet)
            state, expected = dfa.start, [dfa.start]
            for token in tokens[1:]:
                state = dfa.transitions[dfa.alphabet[token]][state]
                expected.append(state)
            assert labels == expected == dfa.run([dfa.alphabet[token] for token in tokens[1:]])


def test_uniform_letters_are_uniform():
    inputs, _ = task("regex:(ab|ba)*", "ab").sample(4000, (10, 10), generator())
    share = (inputs[:, 1:] == 0).double().mean(0)
    assert (share - 0.5).abs().max() < 5 * 0.5 / 4000**0.5


def test_half_of_the_live_words_keep_acceptance_open_to_the_end():
    """Uniform words of (ab|ba)* are in the sink at once; live ones are not."""
    dfa = DFA.from_regex("(ab|ba)*", "ab")
    sink = next(q for q in range(dfa.n_states) if all(t[q] == q for t in dfa.transitions.values()))
    for words, low, high in (("uniform", 0.99, 1.0), ("live", 0.4, 0.5)):
        _, targets = Automaton.of(dfa, words).sample(2000, (64, 64), generator())
        assert low <= (targets[:, -1] == sink).double().mean().item() <= high


def test_open_states_are_those_with_both_kinds_of_words_ahead():
    dfa = DFA.from_regex("[ab]*abba[ab]*", "ab")
    never_lost = {q for q in range(dfa.n_states) if q not in dfa.accepting}
    assert open_states(dfa) == never_lost
    assert open_states(DFA.from_regex("[ab]*", "ab")) == set()


def test_live_words_exist_also_where_nothing_is_open():
    batch = Automaton.of(DFA.from_regex("ab", "ab"), "live").sample(50, (12, 12), generator())
    assert batch.inputs.shape == (50, 13)


def test_the_task_of_a_name():
    assert task("regex:(ab|ba)*", "ab").dfa == DFA.from_regex("(ab|ba)*", "ab")
    assert task("group:Z6").n_classes == 6
    assert task("regex:(ab|ba)*", "ab").chance == 1 / 4
    assert task("group:s_5") == task("group:S5")


def test_a_file_names_a_task_and_the_spec_stands_without_it(tmp_path):
    path = tmp_path / "even.json"
    EVEN.save(path)
    spec = RunSpec(task(f"dfa:{path}")).resolved()
    path.unlink()
    again = RunSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert again.id == spec.id
    assert again.task.dfa == EVEN


@pytest.mark.parametrize(
    ("name", "alphabet", "message"),
    [
        ("regex:(ab", "ab", "never closed at position 0"),
        ("regex:ab", None, "--alphabet ab"),
        ("regex:", "", "alphabet is empty"),
        ("dfa:/nowhere.json", None, "cannot be read"),
        ("dfa:x.json", "ab", "brings its own alphabet"),
        ("group:S", None, "not known"),
        ("s5", "ab", "takes no alphabet"),
        ("regexp:a", "ab", "Did you mean 'regex:'"),
        ("regexp:a", None, "Did you mean 'regex:'"),
        ("regex", "ab", "'regex' is not known"),
    ],
)
def test_mistakes_are_named(name, alphabet, message):
    with pytest.raises(UserError, match=message):
        task(name, alphabet)


@pytest.mark.parametrize("change", [{"words": "slow"}, {"automaton": "{}"}, {"automaton": "nonsense"}])
def test_specs_with_broken_automata_are_refused(change):
    data = RunSpec(Automaton.of(EVEN)).to_dict()
    with pytest.raises(UserError):
        RunSpec.from_dict(data | {"task": data["task"] | change})


def test_a_batch_is_drawn_faster_than_a_step_is_taken():
    """64 words of 256 letters: a look-up of the whole batch per letter, no loop over words."""
    chosen, source = Automaton.of(DFA.from_regex("[ab]*abba[ab]*", "ab"), "live"), generator()
    chosen.sample(64, (256, 256), source)
    started = time.monotonic()
    for _ in range(5):
        chosen.sample(64, (256, 256), source)
    assert (time.monotonic() - started) / 5 < 0.2


def test_a_run_on_an_automaton_measures_every_length(tmp_path):
    spec = RunSpec(
        task("regex:(aa|b)*", "ab"),
        training=TrainingConfig(steps=2, batch=4, train_lengths=(6, 6)),
        evaluation=EvaluationConfig(eval_lengths=(1, 6, 12), eval_samples=8),
    )
    done = run(spec, tmp_path / "run", Options("cpu", say=lambda text: None))
    assert list(done["metrics"]["accuracy"]) == ["1", "6", "12"]
