"""The page about language models, from made-up losses with known differences."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from statetrack.errors import UserError
from statetrack.experiments.item import LabelledRun, range_label
from statetrack.layers import model_config
from statetrack.lm.layout import bin_edges, layout_of
from statetrack.lm.measured import Measured, Perplexities, write_perplexities
from statetrack.report.language_model_page import page_text, write_language_models
from statetrack.report.language_model_results import contrast, differences, judge, read_results
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import Corpus

CONTEXT, LENGTH, SEQUENCES = 8, 32, 12
SPLITS = ("mixture", "code", "math", "recall", "prose")
PAPER = {"mixture": 0.012, "code": -0.05, "math": -0.05, "recall": 0.03, "prose": -0.03}


def write_results(folder, effect, models=("DeltaNet",), seeds=2, negative=0.4, diverged=False):
    """Files as tools/lm_experiment.py writes them; losses with [-1,1] differ by `effect` from the others."""
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(0)
    layouts = {
        f"heldout-{name}": layout_of(
            np.arange(0, LENGTH * SEQUENCES + 2, 16), bin_edges(LENGTH, 4, [CONTEXT])
        )
        for name in SPLITS
    }
    texts = {split: generator.normal(3.0, 0.3, len(layout.tokens)) for split, layout in layouts.items()}
    measured, lines, spectra = [], [], []
    for model in models:
        for seed in range(seeds):
            for eigenvalues in ("[0,1]", "[-1,1]"):
                label, wide = range_label(model, eigenvalues), eigenvalues == "[-1,1]"
                losses = {
                    split: layouts[split].tokens
                    * (texts[split] + 0.001 * seed + wide * effect[split.removeprefix("heldout-")])
                    for split in layouts
                }
                measured.append(Measured(f"{label}-{seed}", label, losses, seed, CONTEXT))
                lines.append(line(model, label, eigenvalues, seed, diverged and wide))
                uses = [use(split, negative if wide else 0.0) for split in layouts]
                spectra.append({"label": label, "seed": seed, "uses": uses})
    write_perplexities(
        folder / "perplexity.json", Perplexities("0" * 64, "concatenated", layouts, tuple(measured))
    )
    (folder / "runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (folder / "spectrum.json").write_text(json.dumps(spectra))
    return folder


def line(model, label, eigenvalues, seed, diverged):
    preset = model_config(model.lower(), d_model=16, layers=1, eigenvalues=eigenvalues)
    training = TrainingConfig(steps=40, batch=2)
    task = Corpus("data", sha256="0" * 64, context=CONTEXT, vocabulary=16)
    spec = RunSpec(task, preset, training, EvaluationConfig(eval_lengths=(CONTEXT,)), seed)
    rows = [{"step": i, "loss": 4.0 - 0.02 * i, "lr": 1e-3} for i in range(1, 41)]
    machine = {"device": "a GPU", "torch": "2.11"}
    done = {"id": spec.id, "metrics": rows[-1], "seconds": 9.0, "machine": machine, "commit": "abc"}
    labelled = LabelledRun("language model", label, model, spec)
    message = "The loss is nan at step 40." if diverged else None
    return labelled.to_dict() | {"done": None if diverged else done, "diverged": message, "rows": rows}


def use(split, negative):
    quantiles = [[-0.5, -0.2, 0.1, 0.5, 0.9]] * 2
    parts = {"negative": [negative] * 2, "negative_part": [-0.1] * 2, "quantiles": quantiles}
    return {"split": split, "layer": 0, "count": 100} | parts


def page_of(folder):
    results = read_results(folder)
    return page_text(results, differences(results))


def test_the_page_says_yes_where_the_papers_findings_are_in_the_data(tmp_path):
    page = write_language_models(write_results(tmp_path / "r", PAPER), tmp_path / "page").read_text()
    assert "**Yes, as in the paper**" in page
    assert "| C | DeltaNet [-1,1] is better on code | **yes** | d = -0.0500" in page
    for name in ("training", "position-deltanet", "differences-deltanet", "spectrum"):
        assert (tmp_path / "page" / f"{name}.svg").stat().st_size > 1000
        assert f"({name}.svg)" in page


def test_the_page_says_no_where_the_data_say_the_opposite(tmp_path):
    worse = dict.fromkeys(SPLITS, 0.05)
    page = page_of(write_results(tmp_path / "r", worse))
    assert "**No**: neither code nor mathematics" in page
    assert "better on code | **no** | d = +0.0500" in page


def test_the_page_lists_what_is_missing(tmp_path):
    page = page_of(write_results(tmp_path / "r", PAPER, seeds=1))
    assert "6 of the planned runs: DeltaNet [0,1], seed 1;" in page
    assert "only one seed has both ranges" in page
    assert "Mamba [-1,1] is worse on code and mathematics | **not measured**" in page


def test_the_page_warns_where_the_negative_half_is_not_used(tmp_path):
    page = page_of(write_results(tmp_path / "r", PAPER, negative=0.004))
    assert "Less than 1% of the eigenvalues are negative in DeltaNet [-1,1], seed 0" in page


def test_mamba_gets_its_own_section_and_verdict(tmp_path):
    page = page_of(write_results(tmp_path / "r", PAPER, models=("DeltaNet", "Mamba")))
    assert "### Mamba" in page
    assert "Mamba [-1,1] is worse on code and mathematics | **no**" in page


def test_a_diverged_run_is_a_result_about_stability(tmp_path):
    results = read_results(write_results(tmp_path / "r", PAPER, diverged=True))
    stable = judge(results, differences(results))[0]
    assert stable.answer == "no"
    assert "diverged with [-1,1]" in stable.because


def test_the_contrast_is_the_mean_gain_on_code_and_math_beyond_that_on_recall(tmp_path):
    found = contrast(read_results(write_results(tmp_path / "r", PAPER)))
    assert found is not None
    assert found.mean == pytest.approx((-0.05 - 0.05) / 2 - 0.03)
    assert found.lower <= found.mean <= found.upper


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        write_language_models(tmp_path, tmp_path / "page")


JOIN = Path(__file__).parents[2] / "tools/lm_experiment_join.py"


def joined(*arguments):
    return subprocess.run([sys.executable, JOIN, *map(str, arguments)], capture_output=True, text=True)


def test_results_of_two_machines_give_the_page_of_both(tmp_path):
    whole = write_results(tmp_path / "whole", PAPER, models=("DeltaNet", "Mamba"))
    parts = [write_results(tmp_path / name, PAPER, models=(name,)) for name in ("DeltaNet", "Mamba")]
    for folder in parts:
        (folder / "log.txt").write_text(folder.name + "\n")
    out = tmp_path / "joined"
    out.mkdir()
    assert joined(*parts, "--out", out).stderr == ""
    assert (out / "runs.jsonl").read_text() == (whole / "runs.jsonl").read_text()
    assert page_of(out) == page_of(whole)
    assert json.loads((out / "spectrum.json").read_text()) == json.loads(
        (whole / "spectrum.json").read_text()
    )
    assert (out / "log.txt").read_text() == "DeltaNet\nMamba\n"


def test_losses_of_different_data_are_not_joined(tmp_path):
    parts = [write_results(tmp_path / name, PAPER, models=(name,)) for name in ("DeltaNet", "Mamba")]
    file = parts[1] / "perplexity.json"
    file.write_text(file.read_text().replace("0" * 64, "1" * 64))
    answer = joined(*parts, "--out", tmp_path)
    assert answer.returncode == 2
    assert "data differs" in answer.stderr
