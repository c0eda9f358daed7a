"""The scripts in examples/ run, and print what their docstrings promise."""

import ast
import json
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def output_of(name, *arguments, cwd=None):
    command = [sys.executable, EXAMPLES / name, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_module_of_ones_own_learns_parity_at_every_length():
    lines = output_of("train_your_own_module.py").splitlines()
    assert lines[-3:] == [f"length {length:>4}  accuracy 1.00" for length in (20, 80, 320)]


@pytest.mark.slow
def test_the_ported_layer_learns_parity_with_negative_eigenvalues_only():
    positive, negative = map(float, re.findall(r"length 128 (\S+)", output_of("port_a_fla_layer.py")))
    assert negative == 1.0
    assert positive < 0.6


def test_a_compiled_regex_agrees_with_re():
    shown = ast.get_docstring(ast.parse((EXAMPLES / "compile_a_regex.py").read_text()))
    expected = re.search(r"Expected output.*?\n\n(.*)", shown, flags=re.S)[1]
    assert output_of("compile_a_regex.py").split() == expected.split()


def test_decoding_token_by_token_equals_one_pass():
    output = output_of("decode_token_by_token.py")
    differences = re.findall(r"one pass (\S+)", output)
    assert len(differences) == 3
    assert max(map(float, differences)) < 1e-4


def test_an_extended_model_goes_on_training():
    """Two steps, then one more: what is printed, not how good it is."""
    output = output_of("extend_the_range.py", "2", "1")
    assert len(re.findall(r"in \[-1,1\], \w+ kept: \d\.\d+ at once, \d\.\d+ after 1 more steps", output)) == 4
    assert len(re.findall(r"still in \[0,1\]: \d\.\d+", output)) == 2


def test_both_forms_of_beta_are_trained_and_measured(tmp_path):
    """Two steps of one run: what is printed, not how good it is."""
    lines = output_of("hard_beta.py", "hard", "bfloat16", "1", "2", cwd=tmp_path).splitlines()
    assert lines[0].split() == ["beta", "precision", "seed", "32", "1536", "2048"]
    assert re.fullmatch(r"hard +bfloat16 +1( +0\.\d{3}){3}", lines[1])
    spec = json.loads(next(tmp_path.glob("results/*/spec.json")).read_text())
    assert (spec["model"]["mixer"]["beta"], spec["training"]["eps"]) == ("hard", 1e-6)


def test_smooth_and_hard_gates_are_trained_and_measured(tmp_path):
    """One step of each setting of both forms of KDA: what is printed, not how good it is."""
    lines = output_of("hard_gates.py", "KDA", "1", cwd=tmp_path).splitlines()
    assert lines[0].split() == ["smooth", "hard", "isometry"]
    assert [line[:36].strip() for line in lines[1:]] == ["KDA [-1,1]", "KDA, signed gate [-1,1]"]
    assert all(len(re.findall(r"\d\.\d{3}", line)) == 9 for line in lines[1:])
    specs = [json.loads(path.read_text()) for path in tmp_path.glob("results/*/spec.json")]
    chosen = {(s["model"]["mixer"]["gate"], s["model"]["mixer"]["beta"]) for s in specs}
    assert chosen == {("smooth", "sigmoid"), ("hard", "hard")}
    assert len(specs) == 18


def test_the_long_stage_starts_from_the_weights_of_the_short_one(tmp_path):
    """Three steps of each stage: what is printed, not how good it is."""
    lines = output_of("short_then_long.py", "s5", "1", "3", cwd=tmp_path).splitlines()
    assert [line.split()[:3] for line in lines] == [["s5", "1", "1-short"], ["s5", "1", "2-long"]]
    short, long = sorted(tmp_path.glob("results/short-then-long/*"))
    weights = sha256((short / "model.safetensors").read_bytes()).hexdigest()
    first, then = (json.loads((stage / "spec.json").read_text()) for stage in (short, long))
    assert (first["initial"], then["initial"]) == ("", weights)
    assert (first["training"]["train_lengths"], then["training"]["train_lengths"]) == ([2, 2], [32, 32])


def test_every_example_is_short_and_tested():
    tests = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in tests, f"{path.name} has no test"
        code = path.read_text().split('"""', 2)[2]
        assert len(code.splitlines()) <= 60, f"{path.name} is no longer short"
