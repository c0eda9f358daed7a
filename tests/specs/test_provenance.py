"""A result names the code it came from."""

import json
import subprocess
from pathlib import Path

import pytest

from statetrack import __version__
from statetrack.provenance import commit
from statetrack.run import run
from statetrack.run_folder import read_done
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import task
from statetrack.training import Options


def git(folder, *arguments):
    names = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.check_output(["git", *names, *arguments], cwd=folder, text=True).strip()


@pytest.fixture
def checkout(tmp_path):
    """A repository with a file in src and one beside it."""
    for name in ("src/a.py", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    commit.cache_clear()
    return tmp_path


def test_a_clean_checkout_is_named_by_its_commit(checkout):
    (checkout / "notes.md").write_text("2\n")  # no code
    name = commit(checkout)
    assert len(name) == 12
    assert git(checkout, "rev-parse", "HEAD").startswith(name)


@pytest.mark.parametrize("changed", ["src/a.py", "src/new.py"])
def test_changes_of_the_code_are_told(checkout, changed):
    (checkout / changed).write_text("2\n")
    assert commit(checkout) == git(checkout, "rev-parse", "--short=12", "HEAD") + "+changes"


def test_without_a_repository_or_an_answer_it_is_the_version(tmp_path, checkout, monkeypatch):
    assert commit(tmp_path / "src") == f"version {__version__}"
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no git
    assert commit(checkout) == f"version {__version__}"


def test_a_run_names_its_commit_and_older_results_read_as_none(tmp_path):
    spec = RunSpec(
        task("parity-dense"),
        training=TrainingConfig(steps=1, batch=2, train_lengths=(4, 4)),
        evaluation=EvaluationConfig(eval_lengths=(4,), eval_samples=2),
    ).resolved()
    done = run(spec, tmp_path, Options(device="cpu", say=lambda text: None))
    assert done["commit"] == commit()
    assert read_done(tmp_path) == done
    del done["commit"]
    Path(tmp_path / "done.json").write_text(json.dumps(done))
    assert read_done(tmp_path) == done | {"commit": None}
