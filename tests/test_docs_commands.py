"""The commands in the pages: each is read by its real parser, and what takes seconds is carried out."""

import argparse
import contextlib
import glob
import importlib
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from docs_blocks import ROOT, blocks, lines

STATETRACK = r"(?:(?:\.venv/bin/)?statetrack|torchrun .*? -m statetrack\.cli) +(.*)"
SPEC_RUN = r"(?:\S*python|torchrun .*?) -m statetrack\.run +(.*)"
REPRODUCE = r"\S*python -m statetrack\.reproduce +(.*)"


def transcripts():
    """Commands after a prompt in blocks that show a terminal; those of docs/automata.md with their output."""
    for page, code in blocks(""):
        for line in lines(code):
            if line.startswith("$ "):
                yield page, line[2:]


EVERY_LINE = [(page, line) for page, code in blocks("sh") for line in lines(code)] + list(transcripts())
COMMANDS = [
    (page, found[1].split(" > ")[0]) for page, line in EVERY_LINE if (found := re.match(STATETRACK, line))
]
SPEC_RUNS = [(page, found[1]) for page, line in EVERY_LINE if (found := re.match(SPEC_RUN, line))]
OTHERS = [
    (page, line)
    for page, line in EVERY_LINE
    if not any(re.match(kind, line) for kind in (STATETRACK, SPEC_RUN))
]


def ids(found):
    return [line for _, line in found]


def test_no_command_hides_in_a_block_without_a_language():
    """A block of output has no commands but behind a prompt, or as the usage of a command."""
    for page, code in blocks(""):
        for line in lines(code):
            usage = "[" in line or "|" in line
            assert usage or not re.match(rf"{STATETRACK}|{SPEC_RUN}", line), f"{page}: {line}"


@pytest.mark.parametrize(("page", "line"), OTHERS, ids=ids(OTHERS))
def test_other_programs_and_files_in_the_pages_exist(page, line):
    """Scripts of this repository, targets of make, extras of pip; anything else is not known here."""
    words = shlex.split(line)
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
        assert {*words[1:]} <= {*targets}
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = re.findall(r"\[(.*?)\]", words[-1])
        assert {name for names in extras for name in names.split(",")} <= {*project["optional-dependencies"]}
        assert (ROOT / words[words.index("-c") + 1]).exists()
    elif found := re.match(REPRODUCE, line):
        with parsed_only():
            importlib.import_module("statetrack.reproduce").main(shlex.split(found[1]))
    elif Path(words[0]).name == "python" and words[1] == "-c":
        compile(words[2], page, "exec")
    elif Path(words[0]).name == "python":
        compile((ROOT / words[1]).read_text(), words[1], "exec")
    else:
        assert words[0] in ("tar",), f"{page}: no test knows {line!r}"


@pytest.mark.parametrize(
    ("page", "line"),
    marked := [(page, line) for page, code in blocks("sh", marked=True) for line in lines(code)],
    ids=ids(marked),
)
def test_commands_that_are_marked_as_not_run_name_files_that_exist(page, line):
    words = shlex.split(line)
    assert words[0] in ("python", "lm_eval"), page
    if words[0] == "python":
        compile((ROOT / words[1]).read_text(), words[1], "exec")


class Parsed(Exception):
    """Raised where a command has read its arguments and its work would begin."""


@contextlib.contextmanager
def parsed_only():
    """Let `argparse` read the arguments of a program, and stop there."""
    read = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, arguments=None, namespace=None):
        read(self, arguments, namespace)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        try:
            yield
        except Parsed:
            return
    pytest.fail("no arguments were parsed")


@pytest.mark.parametrize(("page", "line"), SPEC_RUNS, ids=ids(SPEC_RUNS))
def test_options_of_spec_runs_in_the_pages_parse(page, line):
    """Read by the parser of `python -m statetrack.run`, and stopped there."""
    from statetrack.run import main

    with parsed_only():
        main(shlex.split(line))


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """A folder with token shards, `data`, and a finished run in [0,1], `run`, for commands that read them."""
    from statetrack.layers import model_config
    from statetrack.lm.shards import write_shards
    from statetrack.lm.tokenizers import BytesTokenizer
    from statetrack.run import run
    from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
    from statetrack.tasks import Corpus

    folder = tmp_path_factory.mktemp("language_model")
    text = [[*range(99), *range(99), *range(99)]]
    write_shards(folder / "data", {"train": text, "heldout": text}, 257, 256)
    model = model_config("deltanet", eigenvalues="[0,1]", d_model=8, layers=1)
    training, evaluation = TrainingConfig(steps=1, batch=1), EvaluationConfig(eval_samples=1)
    run(RunSpec(Corpus(str(folder / "data"), context=8), model, training, evaluation), folder / "run")
    for name in ("data", "run"):
        (folder / name / "tokenizer.json").write_text(BytesTokenizer().to_json())
    return folder


def with_values(words: list[str], values: dict[str, Path]) -> list[str]:
    """The words with other values for some flags."""
    return [str(values.get(flag, word)) for flag, word in zip(["", *words[:-1]], words, strict=True)]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=ids(COMMANDS))
def test_commands_in_the_pages_parse(page, line, monkeypatch, language_model, capsys):
    """Their flags are read by the command itself, which is stopped where its work would begin."""
    from statetrack.cli import main
    from statetrack.commands import flags

    read = flags.parse

    def parse_and_stop(*arguments, **options):
        read(*arguments, **options)
        raise Parsed

    words = shlex.split(line)
    if "--help" in words:
        with contextlib.suppress(SystemExit):
            main(words)
        assert capsys.readouterr().out.startswith("usage: statetrack")
        return
    data, run = language_model / "data", language_model / "run"
    if words[0] == "train" or words[:2] == ["lm", "pretrain"]:
        words = [re.sub("^corpus:.*", f"corpus:{data}", word) for word in words]
        words = with_values(words, {"--data": data, "--extend": run})
        if "--initial" in words:  # weights of its shapes: see the test below, which trains
            del words[(i := words.index("--initial")) : i + 2]
        if words[0] == "lm" and not {"--data", "--extend"} & {*words}:
            words += ["--data", str(data)]  # not the standard library, which takes seconds
        main([*words, *([] if "--print-spec" in words else ["--print-spec"])])
        return
    module = ".".join(words[: 2 if words[0] == "lm" else 1]).replace("-", "_")
    monkeypatch.setattr(importlib.import_module(f"statetrack.commands.{module}"), "parse", parse_and_stop)
    with pytest.raises(Parsed):
        main(words)


SMALL = {
    "--steps": 2,
    "--batch": 2,
    "--eval-samples": 2,
    "--d-model": 8,
    "--heads": 2,
    "--eval-lengths": (4, 8),
}
TRAINED = {"--out": "small", "--device": "cpu"}


def small(words: list[str]) -> list[str]:
    """A command that trains, with all that makes it long replaced, and its results in `small`."""
    kept, i = [], 0
    while i < len(words):
        known = words[i] in {**SMALL, **TRAINED, "--eval-every": 0}
        kept += [] if known else [words[i]]
        i += 1
        while known and i < len(words) and not words[i].startswith("--"):
            i += 1
    mixer = words[words.index("--mixer") + 1] if "--mixer" in words else "deltanet"
    flags = {**SMALL, **TRAINED}
    if mixer == "mamba":
        del flags["--heads"]
    for name, value in flags.items():
        kept += [name, *map(str, value if isinstance(value, tuple) else (value,))]
    return kept


TRAINING = [(page, line) for page, line in COMMANDS if line.startswith("train") and "--help" not in line]


@pytest.mark.parametrize(("page", "line"), TRAINING, ids=ids(TRAINING))
def test_commands_that_train_do_so_at_a_small_size(page, line, language_model, tmp_path, monkeypatch, capsys):
    from statetrack.cli import main

    monkeypatch.chdir(tmp_path)
    words = [re.sub("^corpus:.*", f"corpus:{language_model / 'data'}", word) for word in shlex.split(line)]
    if "--initial" in words:  # weights of the same shapes
        i = words.index("--initial")
        main(small(words[:i] + words[i + 2 :]))
        words[i + 1] = str((tmp_path / "small").rename(tmp_path / "first"))
        capsys.readouterr()
    main(small(words))
    printed = capsys.readouterr().out
    if "--print-spec" in words:
        assert '"kind": "RunSpec"' in printed
        return
    assert "step       2  loss" in printed
    assert ("majority" in printed) != ("frequencies alone" in printed)
    assert (tmp_path / "small/done.json").exists()


# Commands that read nothing but their arguments and take seconds at most. docs/automata.md shows what some of
# them print; tests/automata/test_theory_pages.py compares that.
ALONE = ("compile", "explain", "reproduce --list", "lm tokenize --out")
QUICK = [(page, line) for page, line in COMMANDS if line.startswith(ALONE) and "--train" not in line]


@pytest.mark.parametrize(("page", "line"), QUICK, ids=ids(QUICK))
def test_quick_commands_run(page, line, tmp_path, monkeypatch, capsys):
    from statetrack.cli import main

    monkeypatch.chdir(tmp_path)
    main(shlex.split(line))
    assert capsys.readouterr().out


def of_a_run(line: str, run: str) -> list[str]:
    """A command on a run of the pages, on that run instead."""
    return [re.sub(r"results/(RUN|laptop|lm)$", run, word) for word in shlex.split(line)]


ON_TEXT = {
    "lm generate": ["--max-new-tokens", "3", "--prompt", "a"],
    "lm export": [],
    "lm perplexity": ["--length", "16", "--sequences", "2", "--window", "8"],
}
OF_TEXT = [
    (page, line, more) for start, more in ON_TEXT.items() for page, line in COMMANDS if line.startswith(start)
]


@pytest.mark.parametrize(("page", "line", "more"), OF_TEXT, ids=[line for _, line, _ in OF_TEXT])
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_commands_on_a_language_model_run_on_a_small_one(
    page, line, more, language_model, tmp_path, monkeypatch
):
    from statetrack.cli import main

    if line.startswith("lm export"):
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    words = of_a_run(line, str(language_model / "run"))
    words = [str(language_model / "data") if word in ("stdlib", "corpus") else word for word in words]
    names = [word for word in more if word.startswith("--")]
    for name in names:  # a flag may be given once
        if name in words:
            del words[words.index(name) : words.index(name) + 2]
    main([*words, *more])
    assert len(os.listdir(tmp_path)) == (0 if line.startswith("lm generate") else 1)


@pytest.fixture(scope="module")
def tracker(tmp_path_factory):
    """A run on a word problem, of a few steps."""
    from statetrack import train

    folder = tmp_path_factory.mktemp("tracker") / "run"
    options = {"steps": 2, "batch": 2, "d_model": 8, "heads": 2, "eval_lengths": (4,), "eval_samples": 2}
    train("s5-swaps", "deltanet-no-conv", train_lengths=(4, 4), out=folder, verbose=False, **options)
    return folder


ON_RUNS = [
    (page, line) for page, line in COMMANDS if re.match(r"(diagnose|plot-spectrum|snap) results/RUN", line)
]


@pytest.mark.parametrize(("page", "line"), ON_RUNS, ids=ids(ON_RUNS))
def test_commands_on_a_run_work_on_a_small_one(page, line, tracker, tmp_path, monkeypatch, capsys):
    from statetrack.cli import main

    monkeypatch.chdir(tmp_path)
    words = of_a_run(line, str(tracker))
    if words[0] == "snap":  # it was not trained
        with pytest.raises(SystemExit):
            main(words)
        assert "no head has learned the permutations" in capsys.readouterr().err
        return
    main([*words, *(["--longest", "16", "--sequences", "8"] if words[0] == "diagnose" else [])])
    assert "majority" in (printed := capsys.readouterr().out) or "eigenvalue" in printed


@pytest.mark.slow
def test_reports_of_the_results_that_are_kept_are_what_the_pages_say(tmp_path, monkeypatch, capsys):
    """`statetrack report docs/results/*/paper --page DIR`, into another folder."""
    from statetrack.cli import main

    line = "report docs/results/*/paper --page docs/results"
    assert line in [command for _, command in COMMANDS]
    monkeypatch.chdir(ROOT)
    words = [found for word in line.split() for found in (sorted(glob.glob(word)) if "*" in word else [word])]
    words[words.index("--page") + 1] = str(tmp_path / "page")
    main([*words, "--out", str(tmp_path / "out")])
    assert (tmp_path / "page/report.html").exists()
    assert "All of them in one page" in capsys.readouterr().out
