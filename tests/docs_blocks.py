"""The code blocks of the README and of the pages below docs."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def blocks(language: str, marked: bool = False) -> Iterator[tuple[str, str]]:
    """The blocks of a language, each with its page; those after `<!-- not run -->` only if `marked`."""
    for page in PAGES:
        found = re.findall(
            rf"^(<!-- not run -->\n)?```{language}\n(.*?)^```", page.read_text(), flags=re.S | re.M
        )
        name = page.relative_to(ROOT).as_posix()
        yield from ((name, code) for mark, code in found if bool(mark) == marked)


def fences() -> Iterator[tuple[Path, list[str]]]:
    """What the opening fences of a page name."""
    for page in PAGES:
        yield page, re.findall(r"^ *```(.*)$", page.read_text(), flags=re.M)[::2]


def lines(code: str) -> list[str]:
    """The commands of a shell block, without comments; a backslash continues a line."""
    joined = code.replace("\\\n", " ").splitlines()
    return [text for line in joined if (text := " ".join(line.split(" #")[0].split()))]
