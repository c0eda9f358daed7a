"""Results kept in runs.jsonl: the same report, small diffs, nothing lost and nothing damaged in silence."""

import bisect
import json
import math
import random
import shutil
from dataclasses import make_dataclass, replace
from pathlib import Path

import hand_results
import pytest

from statetrack.cli import main
from statetrack.config import added
from statetrack.errors import UserError
from statetrack.experiments.registry import ITEMS
from statetrack.report.records import LOSS_FLOOR, MOST_ROWS, RECORDS, Record, read_records, thin
from statetrack.report.results import INDEX, export, merge, read_index, write_index
from statetrack.report.text import as_text
from statetrack.spec import RunSpec, TrainingConfig

KEPT = sorted((Path(__file__).parents[2] / "docs/results").glob("*/*/" + RECORDS))


def score(run):
    return 0.25 * run.spec.seed + 0.3 * (run.eigenvalues == "[-1,1]")


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.parent.name}-{path.parent.name}")
def test_committed_results_are_read_by_their_ids_and_written_back_to_the_same_bytes(path):
    records = read_records(path)
    assert all(record.run.id == record.run.spec.id for record in records)
    assert (records[0].item, records[0].scale) == path.parts[-3:-1]
    assert "".join(record.to_json() + "\n" for record in records) == path.read_text()
    assert as_text(read_index(path.parent))


def test_there_are_committed_results():
    assert sum(len(read_records(path)) for path in KEPT) >= 24


def test_an_exported_item_has_the_same_table_and_figures(pretend, tmp_path, capsys):
    folder = pretend("fig-parity", "quick", score)
    main(["report", str(folder)])
    shown = capsys.readouterr().out
    main(["report", str(folder), "--export", str(tmp_path / "kept")])
    kept = tmp_path / "kept/fig-parity/quick"
    assert capsys.readouterr().out == shown.replace(str(folder), str(kept))
    assert {path.name for path in kept.iterdir()} == {RECORDS, "report.html", "figure.png", "figure.pdf"}
    shutil.rmtree(tmp_path / "runs")
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    main(["report", str(kept)])
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    assert (folder / "figure.png").read_bytes() == before["figure.png"]


def test_runs_exported_in_two_parts_give_the_bytes_of_one(pretend, tmp_path):
    def part(seeds, where):
        return read_index(pretend("fig-parity", "quick", score, lambda run: run.spec.seed in seeds, where))

    whole = part({0, 1, 2}, tmp_path / "whole")
    export(whole, tmp_path / "a")
    for seeds in ({2}, {0, 1}, {1}):
        _, differing = export(part(seeds, tmp_path / f"{seeds}"), tmp_path / "b")
        assert differing == []
    assert (tmp_path / "b" / RECORDS).read_bytes() == (tmp_path / "a" / RECORDS).read_bytes()


def test_runs_that_have_not_finished_are_not_exported(tmp_path):
    half = hand_results.read(
        tmp_path,
        "fig-parity",
        "quick",
        lambda run: hand_results.scaled(0.5) if run.spec.seed == 1 else None,
    )
    finished = [result.run.id for result in half.finished]
    assert 0 < len(finished) < len(half.results)
    kept, differing = export(half, tmp_path / "kept")
    assert [result.run.id for result in kept.results] == finished
    assert [record.run.id for record in read_records(tmp_path / "kept" / RECORDS)] == finished
    assert differing == []


def test_a_line_holds_the_whole_run(pretend, tmp_path):
    results = read_index(pretend("fig-parity", "quick", score))
    export(results, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / RECORDS).read_text().splitlines()]
    assert len(lines) == len(results.results)
    for line, result in zip(lines, results.results, strict=True):
        assert (line["item"], line["scale"], line["id"]) == ("fig-parity", "quick", result.run.id)
        assert RunSpec.from_dict(line["spec"]) == result.run.spec
        assert {"metrics", "seconds", "machine", "commit"} & {*line} == {*result.done} - {"id"}
        assert line["metrics"] == result.done["metrics"]
        assert [row["step"] for row in line["curve"]] == [1, 2]
    again = read_index(tmp_path)
    assert [r.done for r in again.results] == [r.done for r in results.results]
    assert [row["step"] for row in again.results[0].rows()] == [1, 2, 3]


def test_runs_that_are_kept_stay_and_the_command_says_so(pretend, tmp_path, capsys):
    export(read_index(pretend("fig-parity", "quick", lambda run: 0.5)), tmp_path / "kept/fig-parity/quick")
    before = (tmp_path / "kept/fig-parity/quick" / RECORDS).read_bytes()
    folder = pretend("fig-parity", "quick", lambda run: 0.7, out=tmp_path / "again")
    main(["report", str(folder), "--export", str(tmp_path / "kept")])
    shown = capsys.readouterr().out
    assert "has other results of" in shown
    assert "0.500" in shown
    assert (tmp_path / "kept/fig-parity/quick" / RECORDS).read_bytes() == before


def test_a_folder_may_hold_both_forms(pretend, tmp_path):
    """Seed 0 is kept, seed 1 has a folder, seed 2 is not finished; and seed 0 is listed in both."""
    kept = pretend("fig-parity", "quick", score, lambda run: run.spec.seed == 0)
    export(read_index(kept), kept)
    shutil.rmtree(tmp_path / "runs")
    (kept / INDEX).unlink()
    both = pretend("fig-parity", "quick", score, lambda run: run.spec.seed == 1)
    write_index(both, ITEMS["fig-parity"], "quick", ITEMS["fig-parity"].runs("quick", 3), tmp_path / "runs")
    assert both == kept
    results = read_index(both)
    assert [r.run.spec.seed for r in results.finished] == [0, 1, 0, 1]
    assert [r.run.spec.seed for r in results.results] == [0, 1, 2, 0, 1, 2]
    other = merge([read_index(both), results])
    assert [r.run.id for r in other.results] == [r.run.id for r in results.results]


def test_reproduce_does_not_repeat_runs_that_are_kept(pretend, tmp_path, capsys):
    folder = pretend("fig-parity", "smoke", lambda run: 0.625)
    export(read_index(folder), folder)
    shutil.rmtree(tmp_path / "runs")
    (folder / INDEX).unlink()
    main(["reproduce", "fig-parity", "--scale", "smoke", "--out", str(tmp_path), "--device", "cpu"])
    assert "0.625" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def line_of(**changes):
    """A line of a committed file, with entries replaced; None removes one."""
    data = json.loads(KEPT[0].read_text().splitlines()[0]) | changes
    return json.dumps({name: value for name, value in data.items() if value != "remove"})


ANOTHER_ITEM = "fig-z60" if json.loads(line_of())["item"] == "fig-s5" else "fig-s5"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("<<<<<<< ours", "Expecting value"),
        (line_of()[:300], "line 2 cannot be read as a run"),
        ("[]", "expected an object"),
        (line_of(metrics="remove"), "'metrics' is missing"),
        (line_of(metrics={}), "expected step and loss"),
        (line_of(curve=[{"step": 1}]), "expected step and loss"),
        (line_of(seconds="long"), "'seconds' is long"),
        (line_of(scale="huge"), "scale 'huge' is not known"),
        (line_of(spec={"kind": "RunSpec", "sead": 1}), "Did you mean 'seed'"),
        (line_of(seconds=1.5), "has an earlier line that differs"),
        (line_of(id="another", item=ANOTHER_ITEM), "expected those of one item"),
    ],
)
def test_a_damaged_line_is_named_with_its_file(line, message, tmp_path):
    (tmp_path / RECORDS).write_text(f"{line_of()}\n{line}\n")
    with pytest.raises(UserError) as error:
        read_index(tmp_path)
    assert message in str(error.value)
    assert str(tmp_path / RECORDS) in str(error.value)


def test_a_line_that_came_twice_counts_once(tmp_path):
    (tmp_path / RECORDS).write_text(f"{line_of()}\n\n{line_of()}\n")
    assert len(read_index(tmp_path).results) == 1


def test_an_empty_file_is_a_clear_error(tmp_path):
    (tmp_path / RECORDS).write_text("")
    with pytest.raises(UserError, match="the runs are of none"):
        read_index(tmp_path)


def test_one_id_with_two_specs_is_refused(pretend, tmp_path):
    parts = [read_index(pretend("fig-parity", "quick", score, out=tmp_path / name)) for name in "ab"]
    data = json.loads((tmp_path / "a/fig-parity/quick" / INDEX).read_text())
    data["runs"][0]["spec"]["training"]["batch"] = 7
    (tmp_path / "a/fig-parity/quick" / INDEX).write_text(json.dumps(data))
    with pytest.raises(UserError, match="two different specs"):
        merge([read_index(tmp_path / "a/fig-parity/quick"), parts[1]])


def test_an_index_trusts_the_ids_it_stores(pretend, tmp_path):
    """As if the rule of the hash had changed since: the folder has another name than the spec's id."""
    folder = pretend("fig-parity", "quick", score)
    data = json.loads((folder / INDEX).read_text())
    today = data["runs"][0]["id"]
    data["runs"][0]["id"] = "older0000000"
    (folder / INDEX).write_text(json.dumps(data))
    done = tmp_path / "runs" / today / "done.json"
    done.write_text(json.dumps(json.loads(done.read_text()) | {"id": "older0000000"}))
    shutil.move(tmp_path / "runs" / today, tmp_path / "runs/older0000000")
    results = read_index(folder)
    assert len(results.finished) == len(results.results)
    assert results.results[0].folder.name == "older0000000"

    runs = ITEMS["fig-parity"].runs("quick")
    listed = write_index(folder, ITEMS["fig-parity"], "quick", runs, tmp_path / "runs")
    assert [run.id for run in listed].count("older0000000") == 1
    assert len(listed) == len(runs)
    assert today not in (folder / INDEX).read_text()
    export(read_index(folder), tmp_path / "kept")
    assert "older0000000" in {result.run.id for result in read_index(tmp_path / "kept").results}


def curve(losses):
    return [{"step": 10 * i, "loss": loss, "lr": 1e-3} for i, loss in enumerate(losses, start=1)]


def off(rows, kept):
    """How far the picture of the kept rows is from that of all, in decades."""
    steps = [row["step"] for row in kept]
    height = [math.log10(max(row["loss"], LOSS_FLOOR)) for row in kept]
    worst = 0.0
    for row in rows:
        i = min(max(bisect.bisect(steps, row["step"]), 1), len(kept) - 1)
        part = (row["step"] - steps[i - 1]) / (steps[i] - steps[i - 1])
        here = height[i - 1] + part * (height[i] - height[i - 1])
        worst = max(worst, abs(here - math.log10(max(row["loss"], LOSS_FLOOR))))
    return worst


def test_a_smooth_curve_needs_few_rows():
    rows = curve(10 ** (-4 * i / 1000) for i in range(1000))
    assert len(thin(rows)) == 2
    falling = curve(1 / (1 + i) for i in range(1000))
    assert len(thin(falling)) < 40
    assert off(falling, thin(falling)) < 0.04


def test_short_bursts_stay():
    losses = [0.0] * 2000
    for i in (3, 500, 501, 1500, 1998):
        losses[i] = 1e-3
    rows = curve(losses)
    assert off(rows, thin(rows)) < 0.1
    assert len(thin(rows)) < 25


def test_noise_is_thinned_to_the_limit_and_evaluations_are_kept_besides():
    generator = random.Random(0)
    rows = curve(10 ** generator.uniform(-6, 0) for _ in range(1000))
    for row in rows[::100]:
        row["accuracy"] = {"8": 0.5}
    kept = thin(rows)
    assert len([row for row in kept if "accuracy" not in row]) == MOST_ROWS
    assert [row for row in kept if "accuracy" in row] == rows[::100]
    assert [row["step"] for row in kept] == sorted({row["step"] for row in kept})
    assert (kept[0], kept[-1]) == (rows[0], rows[-1])


def test_rows_with_an_evaluation_are_kept_whole_and_others_as_step_and_loss():
    run = ITEMS["fig-parity"].runs("quick")[0]
    rows = curve([1.0, 0.123456789, 0.25])
    rows[0]["accuracy"] = {"8": 0.5}
    rows[2]["accuracy"] = {"8": 1.0}
    done = {"id": run.id, "metrics": rows[2], "seconds": 1.0, "machine": {}, "commit": None}
    record = Record("fig-parity", "quick", run, done, rows)
    assert json.loads(record.to_json())["curve"] == [rows[0], {"step": 20, "loss": 0.12346}]
    assert Record.from_json(record.to_json()).rows == [rows[0], {"step": 20, "loss": 0.12346}, rows[2]]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_short_curves_stay_whole(count):
    assert thin(curve([1.0] * count)) == curve([1.0] * count)


def test_lines_do_not_change_when_a_config_class_gains_a_field():
    record = read_records(KEPT[0])[0]
    training = record.run.spec.training
    fields = [("accumulate", int, added(1))]
    names = {"__module__": TrainingConfig.__module__}
    Grown = make_dataclass("TrainingConfig", fields, bases=(TrainingConfig,), frozen=True, namespace=names)
    spec = replace(record.run.spec, training=Grown(**vars(training)))
    grown = replace(record, run=replace(record.run, spec=spec))
    assert grown.to_json() == record.to_json()
    spec = replace(spec, training=Grown(**vars(training), accumulate=2))
    assert '"accumulate": 2' in replace(record, run=replace(record.run, spec=spec)).to_json()


def test_an_export_into_the_folder_of_another_item_is_refused(pretend, tmp_path):
    export(read_index(pretend("fig-parity", "smoke", score)), tmp_path / "kept")
    with pytest.raises(UserError, match="expected those of one item"):
        export(read_index(pretend("fig-z60", "smoke", lambda run: 8)), tmp_path / "kept")
