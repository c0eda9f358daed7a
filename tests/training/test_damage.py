"""Checkpoints and results that are damaged, altered or of another run: told, passed over, never believed."""

import json
from dataclasses import replace

import pytest

from statetrack.errors import UserError
from statetrack.files import load_tensors, save_tensors
from statetrack.run import run
from statetrack.run_folder import read_done
from statetrack.training import Options
from statetrack.training.store import checkpoints

QUIET = {"say": lambda text: None}


@pytest.fixture
def whole(small_spec, tmp_path):
    """The metrics and weights of a run that nothing happened to."""
    run(small_spec, tmp_path / "whole", Options(**QUIET))
    return results(tmp_path / "whole")


@pytest.fixture
def cut(small_spec, tmp_path, run_until):
    """The folder of a run that was stopped after step 24, with its newest checkpoint only."""
    run_until(small_spec, tmp_path / "cut", 25)
    for path in checkpoints(tmp_path / "cut")[1:]:
        path.unlink()
    return tmp_path / "cut"


def results(folder):
    return [(folder / name).read_bytes() for name in ("metrics.jsonl", "model.safetensors")]


def finish(spec, folder):
    """Run to the end; what was said on the way."""
    said = []
    run(spec, folder, Options(say=said.append))
    return " ".join(said)


def test_a_truncated_checkpoint_is_reported_and_passed_over(small_spec, tmp_path, run_until):
    run(small_spec, tmp_path / "whole", Options(**QUIET))
    cut = tmp_path / "cut"
    run_until(small_spec, cut, 25)
    newest, before = checkpoints(cut)[:2]
    newest.write_bytes(newest.read_bytes()[:-100])
    said = []
    run(small_spec, cut, Options(say=said.append))
    assert any(newest.name in text and "damaged" in text for text in said)
    assert f"Going on from step {int(before.stem.split('-')[1])} of 40." in said
    assert (cut / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_a_flipped_byte_in_a_checkpoint_is_noticed(small_spec, tmp_path, run_until):
    run_until(small_spec, tmp_path, 25)
    for path in checkpoints(tmp_path):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    said = []
    run(small_spec, tmp_path, Options(say=said.append))
    assert sum("checksum" in text for text in said) == 2
    assert "No checkpoint can be used: starting from step 0." in said


def test_damaged_checkpoints_do_not_push_out_new_ones(small_spec, tmp_path, run_until):
    run_until(small_spec, tmp_path, 25)
    for path in checkpoints(tmp_path):
        path.write_bytes(b"")
    run_until(small_spec, tmp_path, 15)
    said = []
    run(small_spec, tmp_path, Options(say=said.append))
    assert "Going on from step 14 of 40." in said


def test_a_checkpoint_of_another_device_is_refused(small_spec, tmp_path, run_until):
    run_until(small_spec, tmp_path, 15)
    for path in checkpoints(tmp_path):
        tensors, metadata = load_tensors(path)
        save_tensors(path, tensors, metadata | {"device": "cuda"})
    with pytest.raises(UserError, match="written by a run on cuda, this one is on cpu"):
        run(small_spec, tmp_path, Options(device="cpu", **QUIET))


def rewrite(path, change):
    """A checkpoint with other tensors or metadata, and the checksum that goes with them."""
    tensors, metadata = load_tensors(path)
    change(tensors, metadata)
    save_tensors(path, tensors, metadata)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, _: tensors.pop("generator"), "it has no 'generator'"),
        (lambda tensors, _: tensors.pop("loss_sum"), "it has no 'loss_sum'"),
        (lambda _, metadata: metadata.update(step="14"), "it is of step 14"),
        (lambda _, metadata: metadata.update(run="0123456789ab"), "of another run, 0123456789ab"),
    ],
)
def test_a_checkpoint_that_is_not_this_runs_leaves_nothing_behind(small_spec, whole, cut, change, words):
    rewrite(checkpoints(cut)[0], change)
    said = finish(small_spec, cut)
    assert words in said
    assert "starting from step 0" in said
    assert results(cut) == whole


def test_a_checkpoint_put_in_from_another_seed_is_passed_over(small_spec, whole, cut, run_until):
    run_until(replace(small_spec, seed=9), cut.parent / "other", 25)
    checkpoints(cut)[0].write_bytes(checkpoints(cut.parent / "other")[0].read_bytes())
    assert "of another run" in finish(small_spec, cut)
    assert results(cut) == whole


def test_the_checksum_covers_the_header(small_spec, whole, cut):
    path = checkpoints(cut)[0]
    step = int(path.stem.split("-")[1])
    path.write_bytes(
        path.read_bytes().replace(f'"step": "{step}"'.encode(), f'"step": "{step - 10}"'.encode())
    )
    assert "checksum" in finish(small_spec, cut)
    assert results(cut) == whole


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe\xff\n", None])
def test_lost_metrics_are_made_again(small_spec, whole, cut, damage):
    path = cut / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:40] if damage is None else damage)
    assert "metrics.jsonl has 0 of the 4 rows before it" in finish(small_spec, cut)
    assert results(cut) == whole


def test_a_folder_with_a_checkpoints_name_is_none(small_spec, whole, cut):
    (cut / "checkpoint-000000039.safetensors").mkdir()
    assert "Going on from step 24" in finish(small_spec, cut)
    assert results(cut) == whole


@pytest.mark.parametrize("content", [b"[]", b"{}", b"", b'{"metrics": 1}', b"\xff\xff"])
def test_a_done_json_that_is_not_one_does_not_count(small_spec, whole, tmp_path, content):
    folder = tmp_path / "whole"
    (folder / "done.json").write_bytes(content)
    assert read_done(folder) is None
    finish(small_spec, folder)
    assert results(folder) == whole
    assert json.loads((folder / "done.json").read_text())["metrics"]["step"] == 40
