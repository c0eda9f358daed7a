"""Compiled networks as plain data: another program, given the JSON alone, tracks the automaton."""

import json
import random

import machines
import numpy as np
import pytest
import torch

from statetrack.automata import DFA, compile_dfa
from statetrack.automata.export import load_network, network, read_word, save_network
from statetrack.errors import UserError


def run_plain(plain: dict, word: list[str]) -> list[int]:
    """The network from its JSON, written anew: one level after the other."""
    states = [plain["dfa"]["start"]]
    vectors = [np.array(level["H0"], dtype=float) for level in plain["levels"]]
    for letter in word:
        x, state = plain["dfa"]["alphabet"].index(letter), plain["dfa"]["start"]
        for i, level in enumerate(plain["levels"]):
            action = level["actions"][level["action_of"][x]]
            h = vectors[i] = np.array(action["A"]) @ vectors[i] + np.array(action["B"])
            row = int(np.argmax(np.array(level["codebook"]) @ h + np.array(level["bias"])))
            reading = level["labels"][row]
            if level["reads"] == "previous" and action["reset"] is not None:
                reading = int(np.argmax(h - np.eye(level["size"])[action["reset"]]))
            elif level["reads"] == "previous":
                reading = action["inverse"][reading]
            table = level["table"][x if len(level["table"]) > 1 else 0]
            x = state = table[row if level["last"] else reading]
        states.append(state)
    return states


def test_the_plain_data_run_like_the_automaton():
    rng = random.Random(5)
    for _ in range(60):
        dfa = machines.random_dfa(rng, 6)
        for strategy in ("auto", "excluded", "holonomy"):
            plain = json.loads(json.dumps(network(compile_dfa(dfa, strategy))))
            word = machines.random_word(rng, dfa, 60)
            assert run_plain(plain, word) == dfa.run(word)


@pytest.mark.parametrize("strategy", ["group", "cyclic", "reflections"])
def test_groups_run_from_plain_data(strategy):
    dfa = machines.adder(6, 1, 4)
    word = machines.random_word(random.Random(1), dfa, 80)
    assert run_plain(network(compile_dfa(dfa, strategy)), word) == dfa.run(word)


def test_factors_multiply_to_the_transition_in_the_order_they_are_applied():
    for level in network(compile_dfa(machines.SECOND_TO_LAST_B, "excluded"))["levels"]:
        for action in level["actions"]:
            h = np.arange(1.0, level["size"] + 1)
            expected = np.array(action["A"]) @ h + np.array(action["B"])
            for f in action["factors"]:
                k = np.array(f["key"])
                h = h - f["beta"] * k * (k @ h - f["value"])
            np.testing.assert_allclose(h, expected, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_saved_network_is_loaded_and_tracks(tmp_path, dtype):
    dfa = machines.SECOND_TO_LAST_B
    save_network(compile_dfa(dfa, dtype=dtype), tmp_path / "net.safetensors")
    module = load_network(tmp_path / "net.safetensors")
    word = machines.random_word(random.Random(2), dfa, 50)
    tokens = torch.tensor([[dfa.alphabet.index(letter) for letter in word]])
    assert module.states(tokens)[0].tolist() == dfa.run(word)[1:]


@pytest.mark.parametrize(
    ("dfa", "representation"),
    [
        (DFA.from_group("Z6"), "smallest"),
        (machines.word_problem(machines.symmetric(4)), "smallest"),
        (machines.word_problem(machines.dihedral(5)), machines.dihedral(5)),
        (DFA.from_group("Z6"), {"+1": np.array([1, 0, 3, 4, 2])}),
    ],
)
def test_a_network_on_other_points_than_the_states_is_loaded_by_a_plain_path(tmp_path, dfa, representation):
    compiled = compile_dfa(dfa, "group", representation=representation)
    assert compiled.layers[0].size < dfa.n_states
    path = f"{tmp_path}/net.safetensors"
    save_network(compiled, path)
    save_network(compiled, f"{tmp_path}/net.json")
    word = machines.random_word(random.Random(2), dfa, 50)
    tokens = torch.from_numpy(compiled.encode(word))[None]
    assert load_network(path).states(tokens)[0].tolist() == dfa.run(word)[1:]


def test_files_from_before_representations_were_stored_are_read(tmp_path):
    from statetrack.files import load_tensors, save_tensors

    path = tmp_path / "net.safetensors"
    save_network(compile_dfa(DFA.from_group("Z6")), path)
    tensors, metadata = load_tensors(path)
    del metadata["representation"]
    save_tensors(path, tensors, metadata)
    assert load_network(path).n_states == 6


def test_trained_weights_survive_saving(tmp_path):
    from statetrack.files import load_tensors, save_tensors

    path = tmp_path / "net.safetensors"
    save_network(compile_dfa(machines.SECOND_TO_LAST_B), path)
    tensors, metadata = load_tensors(path)
    tensors["levels.0.keys"] += 0.125
    save_tensors(path, tensors, metadata)
    assert torch.equal(load_network(path).levels[0].keys, tensors["levels.0.keys"])


def test_files_that_hold_no_network_are_refused(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    for name in ("x.safetensors", "missing.safetensors"):
        with pytest.raises(UserError, match="holds no compiled network"):
            load_network(tmp_path / name)


def test_a_network_too_large_for_plain_data_says_so():
    with pytest.raises(UserError, match="safetensors"):
        network(compile_dfa(DFA.from_group("Z40")), numbers=1000)


@pytest.mark.parametrize(
    ("text", "alphabet", "word"),
    [
        ("abba", "ab", list("abba")),
        ("a b, b.a", "ab", list("abba")),
        ("+1 +1", ["+1"], ["+1", "+1"]),
        ("t10t1", ["t1", "t10"], ["t10", "t1"]),
        (" ", " ", [" "]),
        ("", "ab", []),
    ],
)
def test_words_are_read_as_people_type_them(text, alphabet, word):
    assert read_word(text, alphabet) == word


def test_a_letter_outside_the_alphabet_is_pointed_at():
    with pytest.raises(UserError, match="position 2"):
        read_word("abxa", "ab")
