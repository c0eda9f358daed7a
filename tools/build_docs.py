"""Build the documentation as HTML: the API from docstrings, and the Markdown pages of the repository.

    python tools/build_docs.py build/docs

README.md becomes index.html; every other page keeps its place, so docs/theory.md becomes docs/theory.html.
The navigation lists the pages that docs/README.md links to, under its headings.
The API reference covers the modules in `MODULES`, of each the names in its `__all__`. A warning is an error.
"""

import argparse
import importlib
import inspect
import re
import shutil
import sys
import typing
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from statetrack.field_comments import field_comments, text_alone

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
    "statetrack.ops.geglu",
    "statetrack.ops.generalised_delta_rule",
    "statetrack.ops.head_norm",
    "statetrack.ops.layer_norm",
    "statetrack.ops.mlstm",
    "statetrack.ops.pack",
    "statetrack.ops.rms_norm",
    "statetrack.ops.rotary",
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
    "statetrack.integrations.huggingface",
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
    render.env.globals |= {"contents": contents(pages)}
    modules = {}
    imported = {name: importlib.import_module(name) for name in MODULES}
    for name, module in imported.items():
        for public in module.__all__:
            getattr(module, public)  # names that load on first access, which pdoc would take for modules
        modules[name] = doc.Module(module)
        for described in modules[name].classes:
            describe_fields(described)
            leave_out_modules_own(described)
            resolve_annotations(described.obj)
    for name, module in modules.items():
        # the names of the package itself have their source on the pages of their own modules: 1.5 MB less
        render.env.globals["show_source"] = name != "statetrack"
        path = output / f"{name.replace('.', '/')}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render.html_module(module, modules))
    (output / "search.js").write_text(render.search_index(modules))


def describe_fields(described: "doc.Class") -> None:
    """Give the fields of a class the comments beside them as docstrings; its own then need not list them."""
    if (text := text_alone(described.obj)) is not None:
        described.docstring = text
    for field, comment in field_comments(described.obj).items():
        member = described.members.get(field)
        if member is not None and (not member.docstring or member.docstring.startswith("Alias for field")):
            member.docstring = comment


def leave_out_modules_own(described: "doc.Class") -> None:
    """Of a class that is an nn.Module: no attributes without a text, no docstrings of nn.Module itself."""
    from torch import nn

    if not issubclass(described.obj, nn.Module):
        return
    for name, member in list(described.members.items()):
        if member.kind == "variable" and not member.docstring:
            del described.members[name]
        elif member.kind == "function" and not _has_text_of_its_own(described.obj, name):
            member.docstring = ""


def _has_text_of_its_own(cls: type, name: str) -> bool:
    """Whether a class of this library on the way to nn.Module gives the method of this name a docstring."""
    ours = (base for base in cls.__mro__ if base.__module__.startswith("statetrack"))
    return any(getattr(vars(base).get(name), "__doc__", None) for base in ours)


def resolve_annotations(cls: type) -> None:
    """Turn the annotations of a generated constructor that are text into types.

    A config of transformers has the fields of its bases in the arguments of its constructor, with annotations
    that only the modules of these bases can read.
    """
    init = inspect.unwrap(vars(cls).get("__init__", object.__init__))
    if not any(isinstance(hint, str) for hint in getattr(init, "__annotations__", {}).values()):
        return
    names: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        names |= vars(sys.modules[base.__module__])
    init.__annotations__ = typing.get_type_hints(init, names)


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
            template.render(
                title=title_of(page),
                body=body,
                toc=body.toc_html,
                up=up,
                here=html_name(page),
                modules=MODULES,
            )
        )


def contents(pages: list[str]) -> dict[str, list[tuple[str, str]]]:
    """The headings of docs/README.md, and under each the pages it links to: (file, text of the link)."""
    overview = ROOT / "docs/README.md"
    groups: dict[str, list[tuple[str, str]]] = {}
    for section in overview.read_text().split("\n## ")[1:]:
        heading, text = section.split("\n", 1)
        for name, link in re.findall(r"\[([^\]]+)\]\(([^)#\s]+)\)", text):
            page = (overview.parent / link).resolve().relative_to(ROOT).as_posix()
            if page in pages:
                groups.setdefault(heading, []).append((html_name(page), name))
    return groups


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
