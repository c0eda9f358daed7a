"""Self-contained HTML pages: the pictures are inside, nothing is fetched."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

from statetrack.errors import require
from statetrack.files import write_text

TEMPLATES = Path(__file__).parent / "templates"


def write_page(path: Path, template_name: str, *, figure: bytes, **values: Any) -> None:
    """Fill a template; every value is escaped."""
    page, _ = template(template_name)
    encoded = base64.b64encode(figure).decode()
    write_text(path, page.render(figure=encoded, **values) + "\n")


def template(name: str) -> tuple[Any, Callable[[str], str]]:
    """A template that escapes what it is given, and the mark that exempts text known to be HTML."""
    jinja2 = require("jinja2", extra="report", for_="writing HTML reports")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(name), require("markupsafe", extra="report", for_="HTML reports").Markup
