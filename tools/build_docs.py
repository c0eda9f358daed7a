"""Build the documentation as HTML: the API from docstrings, and the Markdown pages of the repository.

    python tools/build_docs.py build/docs

README.md becomes index.html; every other page keeps its place, so docs/theory.md becomes docs/theory.html.
The API reference covers the modules in `MODULES`, of each the names in its `__all__`. A warning is an error.
"""

import argparse
import importlib
import inspect
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdoc import doc

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = Path(__file__).with_name("docs_templates")
MODULES = (
    "statetrack",
    "statetrack.ops",
    "statetrack.ops.automaton_run",
    "statetrack.ops.bracket_expressions",
    "statetrack.ops.convolved_delta_rule",
    "statetrack.ops.cross_entropy",
    "statetrack.ops.delta_rule",
    "statetrack.ops.embedding",
    "statetrack.ops.linear_cross_entropy",
    "statetrack.ops.gated_linear_attention",
    "statetrack.ops.generalised_delta_rule",
    "statetrack.ops.mlstm",
    "statetrack.ops.pack",
    "statetrack.ops.rms_norm",
    "statetrack.ops.selective_scan",
    "statetrack.ops.short_convolution",
    "statetrack.ops.slstm",
    "statetrack.ops.swiglu",
    "statetrack.layers",
    "statetrack.tasks",
    "statetrack.tasks.token_shards",
    "statetrack.automata",
    "statetrack.automata.obstruct",
    "statetrack.compat.fla",
    "statetrack.compat.mamba_ssm",
    "statetrack.spec",
    "statetrack.snapping",
    "statetrack.run",
    "statetrack.trained",
    "statetrack.training",
    "statetrack.sweep",
    "statetrack.lm.compare",
    "statetrack.lm.extend",
    "statetrack.lm.generate",
    "statetrack.lm.measure_models",
    "statetrack.lm.measured",
    "statetrack.lm.models",
    "statetrack.lm.perplexity",
    "statetrack.lm.shards",
    "statetrack.lm.specs",
    "statetrack.lm.spectrum",
    "statetrack.lm.tokenize",
    "statetrack.lm.tokenizers",
    "statetrack.integrations.acceleration",
    "statetrack.integrations.huggingface.conversion",
    "statetrack.integrations.lm_eval",
    "statetrack.integrations.loggers",
    "statetrack.reproduce",
    "statetrack.plugins",
)
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md")
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def html_name(page: str) -> str:
    """Where a Markdown page goes in the output, relative to its root."""
    return "index.html" if page == "README.md" else page.removesuffix(".md") + ".html"


def find_pages() -> list[str]:
    """The Markdown pages, relative to the repository."""
    return [path.relative_to(ROOT).as_posix() for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def build_api(output: Path, pages: list[str]) -> None:
    """One HTML file per public module, and the search index."""
    from pdoc import doc, render

    render.configure(docformat="markdown", template_directory=TEMPLATES, footer_text="")
    render.env.globals |= {"pages": [(html_name(page), title_of(page)) for page in pages if is_guide(page)]}
    modules = {}
    imported = {name: importlib.import_module(name) for name in MODULES}
    for name, module in imported.items():
        for public in module.__all__:
            getattr(module, public)  # names that load on first access, which pdoc would take for modules
        modules[name] = doc.Module(module)
        for described in modules[name].classes:
            describe_fields(described)
    for name, module in modules.items():
        path = output / f"{name.replace('.', '/')}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render.html_module(module, modules))
    (output / "search.js").write_text(render.search_index(modules))


def describe_fields(described: "doc.Class") -> None:
    """Give the fields of a class the comments at the ends of their lines as docstrings."""
    for cls in described.obj.__mro__:
        if not cls.__module__.startswith("statetrack."):
            continue
        for field, comment in re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(cls), flags=re.M):
            member = described.members.get(field)
            if member is not None and (
                not member.docstring or member.docstring.startswith("Alias for field")
            ):
                member.docstring = comment


def build_pages(output: Path, pages: list[str]) -> None:
    """Every Markdown page as HTML, its links followed: to the HTML of a page, to a copy of any other file."""
    from pdoc import render, render_helpers

    template = render.env.get_template("page.html.jinja2")
    for page in pages:
        folder = (ROOT / page).parent

        def target(match: re.Match, folder: Path = folder) -> str:
            link, anchor = match[1], match[2] or ""
            if "://" in link:
                return match[0]
            path = (folder / link).resolve().relative_to(ROOT).as_posix()
            if path in pages:
                up = "../" * len(folder.relative_to(ROOT).parts)
                return f"]({up}{html_name(path)}{anchor})"
            (output / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, output / path)
            return match[0]

        path = output / html_name(page)
        path.parent.mkdir(parents=True, exist_ok=True)
        body = render_helpers.to_html(LINK.sub(target, (ROOT / page).read_text()))
        up = "../" * html_name(page).count("/")
        path.write_text(
            template.render(title=title_of(page), body=body, toc=body.toc_html, up=up, modules=MODULES)
        )


def is_guide(page: str) -> bool:
    """Whether a page is listed in the navigation: results are reached from the page about them."""
    return not page.startswith("docs/results/")


def title_of(page: str) -> str:
    """The first heading of a page."""
    return re.search(r"^# (.+)$", (ROOT / page).read_text(), flags=re.M)[1]


def build(output: Path) -> None:
    """Everything, into a fresh folder."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pages = find_pages()
        build_api(output, pages)
        build_pages(output, pages)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="the folder to write; what is in it is deleted first")
    given = parser.parse_args()
    build(given.output)
    print(f"Documentation: {given.output / 'index.html'}", file=sys.stderr)
