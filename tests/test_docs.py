"""The documentation: it builds without warnings, is complete, and its code runs."""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
from docs_blocks import ROOT, blocks, fences


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


def test_layers_show_their_own_texts_and_not_those_of_their_base_class(site):
    page = (site / "statetrack/layers.html").read_text()
    assert "Define the computation performed at every call" not in page
    assert "Initialize internal Module state" not in page
    assert 'id="GLA.to_q"' not in page
    assert 'id="GLA.forward"' in page


def test_the_navigation_begins_with_the_sections_of_the_page_and_marks_it(site):
    page = (site / "docs/gates.html").read_text()
    assert page.index("On this page") < page.index('href="#delta-rule"') < page.index("<h2>Guide</h2>")
    assert re.findall(r'href="([^"]*)" class="here"', page) == ["../docs/gates.html"]


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
    """Every page of the guide and of the API on a narrow screen, some on a wide one."""
    some = ("index", "docs/performance", "docs/tasks", "statetrack/tasks")
    for page in sorted(site.rglob("*.html")) if width == 400 else [site / f"{name}.html" for name in some]:
        if "results" not in page.parts or page.name == "README.html":  # reports have tests of their own
            assert browser.overflow(page, width) == [], page


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


PYTHON = list(blocks("python"))


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[page for page, _ in PYTHON])
def test_python_in_the_pages_runs(page, code, tmp_path, monkeypatch, own_tables):
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(None):
        exec(compile(code, page, "exec"), {})


def test_blocks_are_run_or_marked_whatever_language_they_name():
    """A fence with another name for Python or a shell would escape the tests."""
    for page, opening in fences():
        assert {*opening} <= {"", "python", "sh", "json"}, page
