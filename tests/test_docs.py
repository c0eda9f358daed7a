"""The documentation: it builds without warnings, is complete, and its code runs."""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILDER = load(ROOT / "tools/build_docs.py")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The HTML of everything, built once; a warning fails the build."""
    output = tmp_path_factory.mktemp("docs") / "html"
    BUILDER.build(output)
    return output


def public_names():
    for module in BUILDER.MODULES:
        for name in importlib.import_module(module).__all__:
            yield module, name


PUBLIC = sorted(public_names())
DOCUMENTED = [
    (module, name)
    for module, name in PUBLIC
    if callable(getattr(importlib.import_module(module), name))  # the rest are constants and modules
]


@pytest.mark.parametrize("module", BUILDER.MODULES)
def test_every_public_name_has_an_entry(site, module):
    page = (site / f"{module.replace('.', '/')}.html").read_text()
    for name in importlib.import_module(module).__all__:
        assert f'id="{name}"' in page or f"{module}.{name}" in BUILDER.MODULES, f"{module}.{name}"


def test_comments_on_fields_are_shown(site):
    """As text of their own, not only in the source that a page can unfold."""
    for module, comment in (
        ("spec", "largest gradient norm"),
        ("tasks", "(B, T), integers below"),
    ):
        assert f'<div class="docstring"><p>{comment}' in (site / f"statetrack/{module}.html").read_text()


def test_links_and_anchors_of_the_pages_lead_somewhere(site):
    @functools.cache
    def anchors(path: Path) -> set[str]:
        return set(re.findall('(?:id|name)="([^"]*)"', path.read_text()))

    for path in site.rglob("*.html"):
        if "results" in path.parts:  # reports are copied as they are
            continue
        markup = re.sub(r"<script.*?</script>", "", path.read_text(), flags=re.S)
        for target, anchor in re.findall(r'<a [^>]*href="([^"#:]*)(?:#([^"]*))?"', markup):
            to = path.parent / target if target else path
            assert to.exists(), f"{path.name} links to {target}"
            if anchor and to.suffix == ".html":
                assert anchor in anchors(to.resolve()), f"{target}#{anchor}"


def test_the_navigation_lists_every_page_but_notes_on_the_repository(site):
    """docs/README.md names every page of docs/, and the site shows them under its headings."""
    listed = {file for entries in BUILDER.contents(BUILDER.find_pages()).values() for file, _ in entries}
    pages = {BUILDER.html_name(page) for page in BUILDER.find_pages() if page.startswith("docs/")}
    left_out = {"docs/README.html", "docs/results/language-models/PLAN.html"}
    assert pages - listed == left_out, "every page of docs/ is listed under a heading of docs/README.md"
    navigation = (site / "index.html").read_text()
    assert all(f'href="{file}"' in navigation for file in listed)


@pytest.mark.parametrize("width", [1280, 400])
def test_pages_of_the_site_fit_the_screen(site, browser, width):
    for name in ("index", "docs/performance", "docs/tasks", "statetrack/tasks"):
        assert browser.overflow(site / f"{name}.html", width) == [], name


@pytest.mark.parametrize(("module", "name"), DOCUMENTED)
def test_public_names_say_what_they_do(module, name):
    """In a sentence at least; tasks, automata, specs and runs with an example, an equation or the shapes."""
    value = getattr(importlib.import_module(module), name)
    text = inspect.getdoc(value) or ""
    assert not text.startswith(f"{name}("), f"{module}.{name} has only a generated docstring"
    if inspect.isclass(value) and issubclass(value, Exception):
        assert text, f"{module}.{name} has no docstring"
        return
    assert len(text) >= 50, f"{module}.{name}: only {text!r}"
    if module.split(".")[1:2] in (["tasks"], ["automata"], ["spec"], ["run"]):
        assert any(sign in text for sign in ("\n", "(B", "=")), f"{module}.{name}: only {text!r}"


@pytest.mark.parametrize(("module", "name"), DOCUMENTED)
def test_public_functions_are_fully_typed(module, name):
    value = getattr(importlib.import_module(module), name)
    for function in [value] if inspect.isfunction(value) else methods(value):
        function = inspect.unwrap(function)
        signature = inspect.signature(function)
        for parameter in list(signature.parameters.values()):
            if parameter.name not in ("self", "cls"):
                assert parameter.annotation is not parameter.empty, f"{function.__qualname__}: {parameter}"
        if function.__name__ != "__init__":
            assert signature.return_annotation is not signature.empty, f"{function.__qualname__} returns?"


def methods(cls: type):
    """What the class itself defines and users call: public methods, properties, the constructor."""
    for name, member in vars(cls).items():
        made = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
        generated = name == "__init__" and hasattr(cls, "__dataclass_fields__")
        public = name == "__init__" or not name.startswith("_")
        # the default of a field can be a function, too
        if inspect.isfunction(made) and made.__name__ == name and public and not generated:
            yield made


def blocks(language: str):
    """The code blocks of the pages, each with its page; one after `<!-- not run -->` is left out."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        found = re.findall(rf"(<!-- not run -->\n)?```{language}\n(.*?)```", page.read_text(), flags=re.S)
        name = page.relative_to(ROOT).as_posix()
        yield from ((name, code) for marked, code in found if not marked)


PYTHON = list(blocks("python"))


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[page for page, _ in PYTHON])
def test_python_in_the_pages_runs(page, code, tmp_path, monkeypatch, own_tables):
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(None):
        exec(compile(code, page, "exec"), {})


def test_blocks_are_run_or_marked_whatever_language_they_name():
    """A fence with another name for Python or a shell would escape the tests."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        opening = re.findall(r"^ *```(.*)$", page.read_text(), flags=re.M)[::2]
        assert {*opening} <= {"", "python", "sh", "json"}, page


def commands():
    """The calls of `statetrack` in the pages, without what starts them; a backslash continues a line."""
    for page, code in blocks("sh"):
        for line in code.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:(?:\.venv/bin/)?statetrack|torchrun .*? -m statetrack\.cli) +(.*)", line)
            if found:
                yield page, " ".join(found[1].split(" #")[0].split(" > ")[0].split())


COMMANDS = list(commands())
SPEC_RUNS = [
    (page, found[1])
    for page, code in blocks("sh")
    for line in code.replace("\\\n", " ").splitlines()
    if (found := re.match(r"(?:\S*python|torchrun .*?) -m statetrack\.run +(.*)", line))
]


@pytest.mark.parametrize(("page", "line"), SPEC_RUNS, ids=[line for _, line in SPEC_RUNS])
def test_options_of_spec_runs_in_the_pages_parse(page, line, monkeypatch):
    """Read by the parser of `python -m statetrack.run`, and stopped there."""
    import argparse

    from statetrack.run import main

    class Parsed(Exception):
        pass

    read = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, arguments):
        read(self, arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    with pytest.raises(Parsed):
        main(shlex.split(line.split(" #")[0]))


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """A folder with token shards, `data`, and a finished run in [0,1], `run`, for commands that read them."""
    from statetrack.layers import model_config
    from statetrack.lm.shards import write_shards
    from statetrack.run import run
    from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
    from statetrack.tasks import Corpus

    folder = tmp_path_factory.mktemp("language_model")
    write_shards(folder / "data", {"train": [list(range(99))], "heldout": [list(range(99))]}, 257, 256)
    model = model_config("deltanet", eigenvalues="[0,1]", d_model=8, layers=1)
    training, evaluation = TrainingConfig(steps=1, batch=1), EvaluationConfig(eval_samples=1)
    run(RunSpec(Corpus(str(folder / "data"), context=8), model, training, evaluation), folder / "run")
    return folder


def with_values(words: list[str], values: dict[str, Path]) -> list[str]:
    """The words with other values for some flags."""
    return [str(values.get(flag, word)) for flag, word in zip(["", *words[:-1]], words, strict=True)]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[line for _, line in COMMANDS])
def test_commands_in_the_pages_parse(page, line, monkeypatch, language_model, capsys):
    """Their flags are read by the command itself, which is stopped where its work would begin."""
    from statetrack.cli import main
    from statetrack.commands import flags

    class Parsed(Exception):
        pass

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
        if words[0] == "lm" and not {"--data", "--extend"} & {*words}:
            words += ["--data", str(data)]  # not the standard library, which takes seconds
        main([*words, *([] if "--print-spec" in words else ["--print-spec"])])
        return
    module = ".".join(words[: 2 if words[0] == "lm" else 1]).replace("-", "_")
    monkeypatch.setattr(importlib.import_module(f"statetrack.commands.{module}"), "parse", parse_and_stop)
    with pytest.raises(Parsed):
        main(words)
