"""statetrack train as its user meets it: help, header, progress, and tasks with similar names."""

import io
import json
import re
import subprocess
import sys

import pytest
import torch

import statetrack
from statetrack.cli import main
from statetrack.commands.progress import progress_bars, steps_bar
from statetrack.commands.train import read_arguments
from statetrack.commands.train_help import MIXER_LINES, TASK_LINES
from statetrack.errors import UserError
from statetrack.layers import PRESETS, DeltaNetConfig, model_config
from statetrack.layers.presets import SIZED_PRESETS
from statetrack.run import load_run
from statetrack.tasks import TASKS, task
from statetrack.tasks.automaton import PREFIXES

SMALL = ["--d-model", "8", "--heads", "2", "--steps", "4", "--batch", "4", "--eval-samples", "8"]


def test_help_comes_without_torch():
    code = "import sys; from statetrack.cli import main; main(['train', '--help'])"
    code += "; assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name in (*TASK_LINES, *MIXER_LINES):
        assert f"  {name} " in shown


def test_help_lists_what_there_is():
    built_in = {name for name, value in TASKS.items() if type(value).__module__.startswith("statetrack.")}
    named = {name for name in TASK_LINES if ":" not in name}
    assert named == built_in
    assert {name.partition(":")[0] + ":" for name in TASK_LINES.keys() - named} == {
        *PREFIXES,
        "jsonl:",
        "corpus:",
    }
    theirs = {n for n, c in PRESETS.items() if type(c.mixer).__module__.startswith("statetrack.")}
    assert MIXER_LINES.keys() == theirs


def test_a_header_says_what_is_trained(tmp_path, capsys):
    out = str(tmp_path / "run")
    main(["train", *SMALL, "--out", out, "--log", "tensorboard"])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("DeltaNet [-1,1], 1 layer, ")
    assert "parameters; parity-dense with 3 tokens and 3 classes; " in first
    assert first.endswith(out)
    assert list((tmp_path / "run/tensorboard").iterdir())


def test_accuracies_that_show_nothing_are_called_so(tmp_path, capsys):
    words = ["train", *SMALL, "--task", "regex:(ab|ba)*", "--alphabet", "ab"]
    main([*words, "--out", str(tmp_path / "uniform")])
    assert "show nothing. Draw words that stay" in capsys.readouterr().out
    main([*words, "--words", "live", "--out", str(tmp_path / "live")])
    assert "show nothing" not in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def text(self):
        """What was written, without colours."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


def test_a_terminal_shows_rate_and_time_left():
    terminal = Terminal()
    with steps_bar(100, terminal) as report:
        for step in (50, 60, 70):  # a resumed run
            report(step, {"loss": 0.5})
    shown = terminal.getvalue()
    assert "70/100" in shown
    assert "steps/s" in shown
    assert "left" in shown


def test_the_bars_fit_a_terminal_of_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    with steps_bar(100_000, terminal) as report:
        for step in (1, 50_000):
            report(step, {"loss": 10.5})
    assert re.search(r"50000/100000 loss 10\.500 \S+ steps/s, \d:\d\d:\d\d left", terminal.text())
    terminal, label = Terminal(), "Swaps of five items (S5), DeltaNet [-1,1]"
    with progress_bars([(label, 1000)], terminal) as bar:
        bar(0)(1000, {"loss": 0.5})
    assert re.search(rf"{re.escape(label)} \S+ 1000/1000 loss 0\.500 \d:\d\d:\d\d", terminal.text())


def test_elsewhere_the_bar_shows_nothing():
    stream = io.StringIO()
    with steps_bar(100, stream) as report:
        report(50, {"loss": 0.5})
    assert stream.getvalue() == ""


def test_a_recipe_changes_defaults_and_flags_change_the_recipe(capsys):
    def spec(*flags):
        main(["train", *SMALL, *flags, "--print-spec"])
        return json.loads(capsys.readouterr().out)

    plain, long = spec(), spec("--recipe", "long")
    assert plain["model"]["mixer"]["beta"] == "sigmoid"
    assert long["model"]["mixer"] == plain["model"]["mixer"] | {"beta": "hard"}
    assert {name: x for name, x in long["training"].items() if plain["training"][name] != x} == {
        "lr": 2e-3,
        "warmup": 0.02,
        "weight_decay": 0.0,
        "eps": 1e-6,
        "initial_states": "carried-right",
        "carried_batches": 64,
    }
    own = spec("--recipe", "long", "--lr", "0.5", "--beta", "sigmoid")
    assert own["training"] == long["training"] | {"lr": 0.5}
    assert own["model"] == plain["model"]
    mamba = read_arguments(["--recipe", "long", "--mixer", "mamba", "--steps", "4", "--batch", "4"])[1]
    assert mamba.to_dict()["training"] == long["training"] | {
        name: plain["training"][name] for name in ("initial_states", "carried_batches")
    }
    for mixer in ("gla", "gated-deltanet", "kda", "deltanet-rotating"):  # those that have a gate or angles
        gated = read_arguments(["--recipe", "long", "--mixer", mixer, "--steps", "4", "--batch", "4"])[1]
        assert gated.model.mixer.gate == "hard"
    with pytest.raises(UserError, match="recipe 'short' is not known"):
        read_arguments(["--recipe", "short"])


@pytest.mark.parametrize(
    ("flags", "gate"),
    [
        (["--mixer", "deltanet", "--gated"], "hard"),
        (["--mixer", "deltanet", "--eigenvalues", "unit-circle"], "hard"),
        (["--mixer", "gated-deltanet", "--no-gated"], "smooth"),
        (["--mixer", "gated-deltanet", "--gate=smooth"], "smooth"),
    ],
)
def test_a_recipe_speaks_about_the_gates_that_flags_add_or_take_away(flags, gate):
    assert read_arguments(["--recipe", "long", *flags])[1].model.mixer.gate == gate


@pytest.mark.parametrize(
    "flags",
    [
        ["--train-lengths", "2", "32"],
        ["--train-samples", "1000"],
        ["--tokens-per-element", "2"],
        ["--layers", "2", "--attention-every", "2"],
    ],
)
def test_a_recipe_carries_states_only_where_that_can_be_done(flags):
    words = ["--task", "s5-swaps", "--mixer", "deltanet-no-conv", "--recipe", "long"]
    assert read_arguments(words)[1].training.initial_states == "carried-right"
    assert read_arguments([*words, *flags])[1].training.initial_states == "empty"
    with pytest.raises(UserError, match='initial_states is "carried-right"'):
        read_arguments([*words, *flags, "--initial-states", "carried-right"])


@pytest.mark.parametrize("name", [*PRESETS, *SIZED_PRESETS])
def test_every_mixer_can_be_named_on_the_command_line(name):
    assert read_arguments(["--mixer", name])[1].model == model_config(name)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"schedule": "linear"},
        {"steps": "10"},
        {"steps": 10.5},
        {"lr": "1e-3"},
        {"d_model": 64.0},
        {"seed": "0"},
        {"eval_lengths": 40},
        {"train_lengths": 32},
        {"mixer": 3},
        {"task": 3},
        {"initial": 3},
    ],
    ids=str,
)
def test_wrong_values_from_python_are_named_before_anything_is_trained(options, tmp_path):
    with pytest.raises(UserError, match=next(iter(options))):
        statetrack.train(out=tmp_path / "run", verbose=False, **options)
    assert not (tmp_path / "run").exists()


def test_the_config_of_a_mixer_is_a_model(tmp_path):
    config = statetrack.DeltaNetConfig(heads=2)
    trained = statetrack.train(mixer=config, steps=1, batch=2, eval_samples=2, out=tmp_path, verbose=False)
    assert trained.spec.model == statetrack.ModelConfig(config)


def test_a_recipe_from_python_is_that_of_the_command(tmp_path):
    options = {"d_model": 8, "heads": 2, "steps": 2, "batch": 4, "eval_samples": 8}
    options |= {"recipe": "long", "verbose": False, "lr": 0.01}
    trained = statetrack.train(out=tmp_path / "named", **options)
    flags = [*SMALL, "--steps", "2", "--recipe", "long", "--lr", "0.01"]
    assert trained.spec == read_arguments(flags)[1]
    own = statetrack.train(
        mixer=model_config("deltanet", d_model=8), out=tmp_path / "own", steps=1, recipe="long"
    )
    assert own.spec.model.mixer.beta == "hard"


def test_a_run_starts_from_the_weights_of_another(tmp_path, capsys):
    first = statetrack.train(out=tmp_path / "first", d_model=8, heads=2, steps=2, batch=4, verbose=False)
    flags = [
        *SMALL,
        "--lr",
        "0",
        "--schedule",
        "constant",
        "--initial",
        str(tmp_path / "first"),
        "--seed",
        "7",
    ]
    main(["train", *flags, "--out", str(tmp_path / "second")])
    same, model = load_run(tmp_path / "second")
    assert same.id != read_arguments(flags[:-4])[1].id  # other weights, another run
    before = first.model.state_dict()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    main(["train", *flags, "--out", str(tmp_path / "second")])  # finished: the weights are not needed again
    python = statetrack.train(
        initial=tmp_path / "first" / "model.safetensors",
        out=tmp_path / "second",
        seed=7,
        lr=0.0,
        schedule="constant",
        d_model=8,
        heads=2,
        steps=4,
        batch=4,
        eval_samples=8,
        verbose=False,
    )
    assert python.spec == same


def test_initial_weights_that_are_missing_or_do_not_fit_are_answered_before_anything_is_written(tmp_path):
    sizes = {"d_model": 16, "heads": 2, "steps": 1, "batch": 4, "eval_samples": 2, "verbose": False}
    first = tmp_path / "first"
    statetrack.train(out=first, **sizes)

    def start(**options):
        return statetrack.train(out=tmp_path / "next", **sizes | {"initial": first} | options)

    with pytest.raises(UserError, match=r"nowhere cannot be read.*Expected the folder of a finished run"):
        start(initial=tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"embedding.weight is \(\d, 16\) in .*, expected \(\d, 8\)\.$"):
        start(d_model=8)
    with pytest.raises(UserError, match=r"embedding.weight is .* The vocabulary of the data"):
        start(task="s5-swaps")
    with pytest.raises(UserError, match=r"has eigenvalues in \[-1,1\], this run in \[0,1\]"):
        start(eigenvalues="[0,1]")
    with pytest.raises(UserError, match="has a head that is not its embedding, and this model is tied"):
        start(tied=True)
    assert not (tmp_path / "next").exists()
    assert start(beta="hard").spec.initial  # nearly the same function


def test_a_path_of_initial_weights_without_their_hash_is_refused():
    with pytest.raises(UserError, match="initial_path is '/a' without initial"):
        statetrack.RunSpec(initial_path="/a").resolved()


def test_s5_and_group_s5_are_two_tasks():
    assert (task("s5").vocab_size, task("s5").n_classes) == (121, 121)
    assert (task("group:S5").vocab_size, task("group:S5").n_classes) == (3, 5)


@pytest.mark.parametrize("name", ["S5", "s_5", "A5", "z7", "D4"])
def test_a_bare_group_is_answered_with_both_tasks(name):
    group = name.replace("_", "").upper()
    with pytest.raises(UserError, match=f"--group {group}.*'group:{group}'"):
        task(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": 1e-3}, r"option 'learning_rate' .* Here: lr\. More"),
        ({"batch_size": 3}, r"Here: batch\. More"),
        ({"mixer": "mamba", "num_heads": 3}, r"Here: heads, though not in mamba"),
        (
            {"mixer": DeltaNetConfig(heads=2), "d_model": 32},
            r"ModelConfig\(DeltaNetConfig\(heads=2\), d_model",
        ),
        ({"mixer": None, "d_model": 32}, "mixer is None, expected a name such as 'deltanet'"),
        ({"mixer": DeltaNetConfig, "d_model": 32}, "mixer is <class .*, expected a name such as"),
        ({"device": None}, "device is None, expected auto, cpu or cuda"),
        ({"recipe": ["long"]}, r"recipe \['long'\] is not known"),
        ({"out": 5}, "out is 5, expected a folder"),
        ({"out": ""}, "out is '', expected a folder"),
    ],
    ids=str,
)
def test_wrong_arguments_from_python_are_answered_with_what_to_write(arguments, message):
    with pytest.raises(UserError, match=message):
        statetrack.train("s5-swaps", steps=1, **arguments)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train-samples", "8"], "but the task brings its own training set"),
        (["--train-lengths", "1", "2"], "no training sequence has 1 to 2 tokens"),
    ],
)
def test_a_stored_task_refuses_before_it_leaves_a_folder(flags, message, tmp_path, capsys):
    lines = [json.dumps({"inputs": [1, 2, 0] * n, "targets": [0, 1, 1] * n}) for n in range(1, 40)]
    (tmp_path / "my.jsonl").write_text("\n".join(lines))
    task_flags = ["--task", f"jsonl:{tmp_path / 'my.jsonl'}", "--out", str(tmp_path / "left")]
    with pytest.raises(SystemExit):
        main(["train", *SMALL, *task_flags, *flags])
    assert message in (shown := capsys.readouterr()).err
    assert not shown.out
    assert not (tmp_path / "left").exists()
