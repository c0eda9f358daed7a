"""Tasks and mixers from outside the package: in flags, specs, sweeps and resumed runs, as those inside."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import pytest
import torch

from statetrack import build, config, layers, plugins, register_mixer, register_task, task, tasks
from statetrack.cli import main
from statetrack.errors import UserError
from statetrack.layers import DeltaNetConfig, MambaConfig, ModelConfig, model_config
from statetrack.run import load_run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.sweep import Job, sweep
from statetrack.tasks import Parity
from statetrack.tasks.contract import check_task

SMALL = ["--d-model", "8", "--batch", "4", "--eval-samples", "8", "--device", "cpu"]
FLAGS = ["--task", "count", "--divisor", "5", "--mixer", "leaky", "--decay", "0.9"]


pytestmark = pytest.mark.usefixtures("own_tables")


def labelled_at(where, tokens):
    """A `fill` with labels at these positions only."""

    def fill(*_):
        targets = torch.full((2, tokens), -100)
        targets[:, where] = 0
        return tasks.Batch(torch.zeros_like(targets), targets)

    return fill


def exit_code(arguments):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    return exit.value.code


def statetrack(*arguments, **variables):
    """A process of its own; returns it unfinished."""
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
def test_a_killed_run_of_an_outside_task_and_mixer_goes_on_to_the_same_bytes(plugin, tmp_path):
    train = ["train", "--plugin", str(plugin), *FLAGS, *SMALL, "--steps", "150", "--log-every", "10"]
    main([*train, "--out", str(tmp_path / "whole")])
    cut = tmp_path / "cut"
    process = statetrack("statetrack.cli", *train, "--out", str(cut), "--checkpoint-seconds", "0")
    while len(list(cut.glob("checkpoint-*"))) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert not (cut / "done.json").exists()
    # goes on from the spec the run left, through the other command, with the variable instead of the flag
    resume = ["statetrack.run", str(cut / "spec.json"), "--out", str(cut), "--device", "cpu"]
    output = finish(statetrack(*resume, STATETRACK_PLUGINS=str(plugin)))
    assert "Going on from step" in output
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (cut / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()

    spec, model = load_run(cut)
    assert (type(spec.task).__name__, spec.task.divisor, spec.model.mixer.decay) == ("CountTask", 5, 0.9)
    assert type(model.blocks[0].mixer).__name__ == "Leaky"
    main(["plot-spectrum", str(cut), "--plugin", str(plugin)])
    assert (cut / "spectrum.png").exists()


def outside_spec():
    return RunSpec(
        task("count"),
        model_config("leaky", d_model=8, decay=0.25),
        TrainingConfig(steps=3, batch=2, log_every=1),
        EvaluationConfig(eval_lengths=(6,), eval_samples=4),
    ).resolved()


@dataclass(frozen=True)
class Mine(Parity):
    bits: int = 1


@pytest.mark.slow
def test_workers_of_a_sweep_know_plugins_and_fail_only_runs_of_classes_they_cannot_know(plugin, tmp_path):
    plugins.use_plugins([str(plugin)])
    register_task("mine", Mine())  # in this process alone
    outside = outside_spec()
    evaluation = EvaluationConfig(eval_lengths=(6, 12), eval_samples=4)
    mine = replace(outside, task=task("mine"), evaluation=evaluation).resolved()
    jobs = [Job("mine", mine, tmp_path / "mine"), Job("outside", outside, tmp_path / "outside")]
    (failure,) = sweep(jobs, device="cpu")
    assert failure.job.label == "mine"
    assert "'Mine' is not known" in failure.reason
    assert "STATETRACK_PLUGINS" in failure.reason
    assert json.loads((tmp_path / "outside/done.json").read_text())["metrics"]["step"] == 3


def test_build_and_specs_take_outside_names(plugin, monkeypatch):
    monkeypatch.setenv(plugins.VARIABLE, str(plugin))  # loaded when the name is looked up, not before
    assert "leaky" not in layers.PRESETS
    model = build("leaky", vocab_size=3, n_classes=2, d_model=8, decay=0.75)
    assert model.blocks[0].mixer.decay == 0.75
    spec = outside_spec()
    assert RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_a_spec_imports_nothing_but_names_the_ways_to_a_plugin(plugin):
    loaded = {*sys.modules}
    data = RunSpec().to_dict()
    data["task"] = {"kind": "CountTask", "divisor": 5}
    with pytest.raises(UserError, match=r"'CountTask' is not known.*--plugin FILE.py.*STATETRACK_PLUGINS"):
        RunSpec.from_dict(data)
    data["task"] = {"kind": str(plugin)}
    with pytest.raises(UserError, match="is not known"):
        RunSpec.from_dict(data)
    assert not [name for name in {*sys.modules} - loaded if "outside" in name]


def test_packages_bring_plugins_by_entry_points(plugin, tmp_path, monkeypatch):
    """One module, one function to call, and one that is broken and passed over."""
    (tmp_path / "package_of_functions.py").write_text(
        "from statetrack import register_mixer\n"
        "from statetrack.layers import MambaConfig, ModelConfig\n"
        "def register():\n    register_mixer('wide-mamba', ModelConfig(MambaConfig(), d_model=256))\n"
    )
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[statetrack.plugins]\na = outside\nb = package_of_functions:register\nc = no_such_package\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="'c' .no_such_package. cannot be loaded: ModuleNotFoundError"):
        assert model_config("wide-mamba").d_model == 256
    assert task("count").divisor == 3
    sys.modules.pop("outside")


def test_the_same_registration_twice_is_fine():
    for _ in range(2):
        register_task("mine", Mine())
        register_mixer("mine", DeltaNetConfig(heads=2))
    assert task("mine") == Mine()
    assert model_config("mine") == ModelConfig(DeltaNetConfig(heads=2))


def test_a_class_may_be_defined_again_as_by_a_notebook_cell():
    def cell():
        @dataclass(frozen=True)
        class Again(Parity):
            pass

        register_task("again", Again())
        return Again

    cell()
    second = cell()
    assert type(task("again")) is second
    assert type(config.from_dict({"kind": "Again"})) is second


@dataclass(frozen=True)
class DeltaNetTask(Parity):
    pass


DeltaNetTask.__name__ = "DeltaNetConfig"


@dataclass
class Mutable:
    def build(self, d_model, layers): ...


@dataclass(frozen=True)
class Layers:
    layers: int = 1

    def build(self, d_model, layers): ...


@dataclass(frozen=True)
class NoJson(Parity):
    words: frozenset = frozenset("ab")


@dataclass(frozen=True)
class Grows(Parity):
    bits: int = 1

    def __post_init__(self):
        object.__setattr__(self, "bits", self.bits + 1)


@pytest.mark.parametrize(
    ("register", "name", "what", "message"),
    [
        (register_task, "parity", Mine(), "the name 'parity' is taken by Parity()"),
        (register_task, "mine", DeltaNetTask(), "both have a class 'DeltaNetConfig'"),
        (register_task, "mine", DeltaNetConfig(), "is not a Task"),
        (register_task, "mine", Mine, "is not a Task"),
        (register_task, "my:task", Mine(), "the name is 'my:task'"),
        (register_task, "--mine", Mine(), "the name is '--mine'"),
        (register_task, "mine", NoJson(), "cannot be written as JSON"),
        (register_task, "mine", Grows(), "not the same once written as JSON"),
        (register_mixer, "mamba", DeltaNetConfig(), "the name 'mamba' is taken by ModelConfig"),
        (register_mixer, "mine", MambaConfig, "is not an instance"),
        (register_mixer, "mine", Mine(), "is not an instance of a dataclass with a `build`"),
        (register_mixer, "mine", Mutable(), "Mutable is mutable"),
        (register_mixer, "mine", Layers(), "has a field 'layers', and so has the backbone"),
    ],
)
def test_what_cannot_be_registered_is_refused(register, name, what, message):
    with pytest.raises(UserError) as error:
        register(name, what)
    assert message in str(error.value)
    assert tasks.TASKS.get("mine") is None
    assert layers.PRESETS.get("mine") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": "all"}, "labels is 'all', expected"),
        ({"labels": "given"}, "derived from statetrack.tasks.StoredTask"),
        ({"labels": "dense"}, "drew 2 tokens for length 3, expected 4"),
        ({"labels": "dense", "fill": labelled_at(-1, 4)}, "expected a label at every position"),
        ({"fill": labelled_at(slice(0, 2), 4)}, "expected one label in every sequence"),
        ({"fill": lambda *_: tasks.Batch(torch.zeros(2, 3).long(), torch.zeros(2).long())}, "targets (2,)"),
        ({"vocab_size": 2}, "drew inputs from 1 to 2, expected 0 to 1, since its vocab_size is 2"),
        ({"n_classes": 1}, "drew targets from 1 to 2, expected 0 to 0, since its n_classes is 1"),
        ({"fill": lambda *_: tasks.Batch(torch.zeros(2, 3), torch.zeros(2, 3).long())}, "of torch.float32"),
    ],
)
def test_a_task_that_breaks_the_contract_is_refused_when_registered(changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        register_task("mine", type("Mine", (Parity,), changes)())


def test_a_task_without_lengths_is_refused_when_registered():
    class Mine(tasks.Task):
        labels, vocab_size, n_classes, chance, fill = "last", 2, 2, 0.5, Parity.fill

    with pytest.raises(UserError, match="Mine has no train_lengths"):
        register_task("mine", Mine())


@pytest.mark.parametrize("name", tasks.TASKS)
def test_tasks_of_the_package_keep_the_contract(name):
    check_task("here", tasks.TASKS[name])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "FileNotFoundError"),
        ("x = 1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
        ("import statetrack\nstatetrack.register_task('parity', 3)", "3 is not a Task"),
        ("import no_such_module", "no_such_module"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_ends_with_code_2_each_time(text, message, tmp_path, capsys):
    path = tmp_path / "broken.py"
    if text is not None:
        path.write_text(text)
    for _ in range(2):
        assert exit_code(["train", "--plugin", str(path), "--print-spec"]) == 2
        assert f"plugin {str(path)!r} cannot be loaded" in (shown := capsys.readouterr().err)
        assert message in shown
    assert os.environ[plugins.VARIABLE] == ""


def test_a_plugin_can_be_a_module(plugin, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    main(["train", "--plugin=outside", *FLAGS, "--print-spec"])
    shown = json.loads(capsys.readouterr().out)
    assert (shown["task"], shown["model"]["mixer"]["decay"]) == ({"kind": "CountTask", "divisor": 5}, 0.9)
    assert os.environ[plugins.VARIABLE] == "outside"
    sys.modules.pop("outside")
    assert exit_code(["train", "--plugin", "no.such.module"]) == 2
    assert "No module named 'no'. Give a file that ends with .py" in capsys.readouterr().err


def test_the_help_lists_names_from_outside(plugin, capsys):
    assert exit_code(["train", "--plugin", str(plugin), "--task", "count", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "count" in shown
    assert "leaky" in shown
    assert "--divisor" in shown


def test_a_flag_that_two_parts_would_share_is_refused(tmp_path, capsys):
    path = tmp_path / "shares.py"
    path.write_text(
        "from dataclasses import dataclass, replace\n"
        "from statetrack import register_task\n"
        "from statetrack.tasks import Parity\n"
        "@dataclass(frozen=True)\n"
        "class Shares(Parity):\n    batch: int = 1\n"
        "register_task('shares', Shares())\n"
    )
    assert exit_code(["train", "--plugin", str(path), "--task", "shares"]) == 2
    assert (
        "--batch would be a field of the task and of the training TrainingConfig" in capsys.readouterr().err
    )


def test_files_are_one_plugin_by_whatever_path_they_are_named(plugin, monkeypatch):
    monkeypatch.chdir(plugin.parent)
    plugins.use_plugins([plugin.name, str(plugin)])
    assert os.environ[plugins.VARIABLE] == str(plugin)
    with pytest.raises(UserError, match="holds a comma"):
        plugins.use_plugins(["a,b.py"])
