"""statetrack explain, compile and factor as a user meets them."""

import json
import subprocess
import sys

import machines
import numpy as np
import pytest

from statetrack.automata import DFA
from statetrack.automata.export import load_network
from statetrack.cli import main
from statetrack.experiments.verdicts import runs
from statetrack.spec import RunSpec

REGEX = ["--regex", "(a|b)*b(a|b)", "--alphabet", "ab"]


def shown(capsys, *arguments):
    main(list(arguments))
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain"], "found none"),
        (["explain", "--regex", "a", "--group", "S3", "--alphabet", "a"], "found --regex and --group"),
        (["explain", "--regex", "a"], "--alphabet a."),
        (["explain", "--group", "S3", "--alphabet", "ab"], "--alphabet belongs to --regex"),
        (["explain", "--regex", "a(b", "--alphabet", "ab"], "never closed at position 1. a(b ^"),
        (["explain", "--dfa", "/nowhere.json"], "cannot be read"),
        (["explain", "--group", "X5"], "'X5' is not known"),
        (["explain", "--regex", "[ab]*", "--alphabet", "ab", "--train"], "nothing to train"),
        (["explain", *REGEX, "--train", "--steps", "0"], "steps is 0"),
        (["explain", *REGEX, "--train", "--train-length", "0"], "train_lengths is 0"),
        (["explain", *REGEX, "--html", "."], "a folder"),
        (["compile", *REGEX, "--strategy", "grup"], "Did you mean 'group'"),
        (["compile", *REGEX, "--strategy", "group"], "needs letters that permute"),
        (["compile", *REGEX, "--dtype", "int8"], "int8"),
        (["compile", *REGEX, "--word", "abc"], "position 2"),
        (["compile", *REGEX, "--out", "net.txt"], ".safetensors"),
        (["factor", "/nowhere.npy"], "cannot be read"),
        (["factor"], "Missing"),
        (["train", "--task", "regex:a(b", "--alphabet", "ab"], "never closed at position 1. a(b ^"),
        (["train", "--task", "regex:ab"], "--alphabet ab"),
        (["train", "--task", "dfa:/nowhere.json"], "cannot be read"),
        (["train", "--alphabet", "ab"], "takes no alphabet"),
        (["train", "--task", "regexp:a", "--alphabet", "ab"], "Did you mean 'regex:'"),
        (["train", "--task", "regex:ab", "--alphabet", "ab", "--words", "dead"], "dead"),
    ],
)
def test_mistakes_end_with_code_2_and_name_the_problem(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    output = capsys.readouterr()
    assert message in " ".join((output.err + output.out).split())
    assert "Traceback" not in output.err


def test_explain_fits_a_terminal_and_names_witnesses(capsys):
    text = shown(capsys, "explain", "--group", "S5")
    assert "witness: c^k, period 5 in k" in text
    assert "cheapest class proven here to suffice: DeltaNet with rotations, 1 layer" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_group_is_shown_by_its_usual_name(capsys):
    assert shown(capsys, "compile", "--group", "s_3") == shown(capsys, "compile", "--group", "S3")


def test_explain_as_json_has_the_table(capsys):
    record = json.loads(shown(capsys, "explain", *REGEX, "--json"))
    assert record["name"] == "(a|b)*b(a|b)"
    assert record["analysis"]["states_min"] == 4
    assert record["verdicts"][0]["model"]["name"] == "diagonal [0,1]"
    assert {v["answer"] for v in record["verdicts"]} == {"yes", "unknown"}


def test_explain_json_stays_json_when_a_page_is_written_too(capsys, tmp_path):
    assert json.loads(shown(capsys, "explain", *REGEX, "--json", "--html", str(tmp_path / "page.html")))
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_a_file_a_regex_and_a_group_say_the_same(capsys, tmp_path):
    DFA.from_group("Z3").save(tmp_path / "z3.json")
    tables = [
        json.loads(shown(capsys, "explain", *given, "--json"))["verdicts"]
        for given in (["--group", "Z3"], ["--dfa", str(tmp_path / "z3.json")])
    ]
    assert tables[0] == tables[1]
    by_regex = json.loads(shown(capsys, "explain", "--regex", "(aaa)*", "--alphabet", "a", "--json"))[
        "verdicts"
    ]
    assert [v["answer"] for v in by_regex] == [v["answer"] for v in tables[0]]


@pytest.mark.parametrize("strategy", ["auto", "excluded", "holonomy"])
def test_compile_runs_a_word(strategy, capsys):
    text = shown(capsys, "compile", *REGEX, "--strategy", strategy, "--word", "abba")
    assert "accepted; the automaton agrees at every step" in text
    assert max(map(len, text.splitlines())) <= 100


def test_compile_as_json_has_every_matrix_and_the_word(capsys):
    record = json.loads(shown(capsys, "compile", *REGEX, "--json", "--word", "abb"))
    assert [level["size"] for level in record["levels"]] == [2, 2]
    assert record["levels"][0]["actions"][0]["A"] == [[0.25, 0], [0, 0.25]]
    assert record["word"] == {
        "letters": ["a", "b", "b"],
        "states": machines.SECOND_TO_LAST_B.run("abb"),
        "accepted": True,
        "agrees": True,
    }


def test_compile_saves_weights_that_load(capsys, tmp_path):
    for name in ("net.safetensors", "net.json"):
        assert f"Saved to {tmp_path / name}" in shown(
            capsys, "compile", *REGEX, "--out", str(tmp_path / name)
        )
    assert load_network(tmp_path / "net.safetensors").n_states == 4
    assert json.loads((tmp_path / "net.json").read_text())["strategy"] == "holonomy"


@pytest.mark.parametrize(
    "given", [["--regex", "", "--alphabet", ""], ["--regex", "[ab]*", "--alphabet", "ab"]]
)
def test_machines_with_nothing_to_track(given, capsys):
    assert "nothing to track" in shown(capsys, "compile", *given, "--word", "")
    assert "diagonal [0,1]" in shown(capsys, "explain", *given)


def test_compile_of_a_large_machine_says_what_it_could_not_tabulate(capsys):
    text = shown(capsys, "compile", "--regex", "[ab]*a[ab]{6}", "--alphabet", "ab", "--strategy", "excluded")
    assert "and 115 more levels" in text


def test_factor_prints_factors_and_error(capsys, tmp_path):
    np.save(tmp_path / "cycle.npy", np.eye(4)[[1, 2, 0, 3]])
    text = shown(capsys, "factor", str(tmp_path / "cycle.npy"))
    assert "a permutation of size 4" in text
    assert "2 factors (n - cycles), largest error 0.0e+00" in text


def test_factor_as_json_multiplies_back(capsys, tmp_path):
    M = 0.2 * np.random.default_rng(0).normal(size=(5, 5))
    np.save(tmp_path / "m.npy", M)
    record = json.loads(shown(capsys, "factor", str(tmp_path / "m.npy"), "--json"))
    product = np.eye(5)
    for beta, v in zip(record["betas"], np.array(record["vectors"]), strict=True):
        product = product @ (np.eye(5) - beta * np.outer(v, v))
    np.testing.assert_allclose(product, M, atol=1e-14)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.array([{}], dtype=object), "not a plain .npy file"),
        (2 * np.eye(3), "norm 2"),
        (np.ones((2, 3)), "expected (n, n)"),
        (np.array([[np.nan]]), "is nan"),
        (b"text, not numpy", "not a plain .npy file"),
        (b"", "not a plain .npy file"),
    ],
)
def test_files_that_hold_no_contraction_are_refused(content, message, capsys, tmp_path):
    path = tmp_path / "m.npy"
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)
    with pytest.raises(SystemExit) as exit:
        main(["factor", str(path)])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_an_archive_of_arrays_is_no_matrix(capsys, tmp_path):
    np.savez(tmp_path / "m.npz", M=np.eye(2))
    with pytest.raises(SystemExit) as exit:
        main(["factor", str(tmp_path / "m.npz")])
    assert exit.value.code == 2
    assert "one matrix" in capsys.readouterr().err


def test_pickles_are_never_opened(capsys, tmp_path):
    """A file that would run code when unpickled is refused, and its code does not run."""
    import pickle

    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "boom"), "w"))

    (tmp_path / "m.npy").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(SystemExit):
        main(["factor", str(tmp_path / "m.npy")])
    assert not (tmp_path / "boom").exists()


def test_train_puts_measured_accuracy_beside_the_verdicts(capsys, tmp_path):
    """Two steps per run: everything but the accuracy."""
    page = tmp_path / "page.html"
    given = ["--group", "Z3", "--train", "--steps", "2", "--train-length", "4", "--out", str(tmp_path)]
    text = shown(capsys, "explain", *given, "--device", "cpu", "--html", str(page))
    assert "8x = 32" in text
    assert "Training can fail" in text
    assert "What training found" in page.read_text()
    record = json.loads(shown(capsys, "explain", *given, "--device", "cpu", "--json"))
    measured = record["measured"]
    assert {row["answer"] for row in measured} == {"yes", "no"}
    assert all(len(row["accuracy"]) == 4 and 0 <= min(row["accuracy"]) <= 1 for row in measured)
    spec = RunSpec.load(f"{measured[0]['folder']}/spec.json")
    assert spec.task.dfa == DFA.from_group("Z3").minimal()
    assert measured[0]["folder"].endswith(spec.id)


@pytest.mark.parametrize("pattern", ["[ab]*b[ab]", "(b*ab*a)*b*", "([ab]{3})*a", "(aa|b)*"])
def test_runs_cover_the_cheapest_class_and_no_unknown(pattern):
    from statetrack.automata import explain

    found = explain(DFA.from_regex(pattern, "ab"))
    planned = runs(found, 10, 8)
    assert found.cheapest in [r.verdict.model for r in planned]
    assert all(r.verdict.answer != "unknown" for r in planned)
    for r in planned:
        assert r.spec.model.mixer.eigenvalues == r.verdict.model.eigenvalues
        assert r.spec.model.layers == (r.verdict.model.layers or r.spec.model.layers)


def test_importing_the_library_loads_no_page_or_automata_command():
    code = "import statetrack, sys; print([m for m in sys.modules if 'report' in m or 'commands' in m])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
