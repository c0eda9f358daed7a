"""Self-contained HTML pages: pictures are embedded, nothing is loaded from elsewhere."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

from statetrack.errors import require
from statetrack.files import write_text

TEMPLATES = Path(__file__).parent / "templates"


def write_page(path: Path, template_name: str, **values: Any) -> None:
    """Fill a template; every value is escaped."""
    page, _ = template(template_name)
    write_text(path, page.render(**values) + "\n")


def embedded(svg: bytes) -> str:
    """A picture as the address of an <img>, which carries the picture itself."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def template(name: str) -> tuple[Any, Callable[[str], str]]:
    """A template with autoescaping, and the `Markup` class that marks text as HTML."""
    jinja2 = require("jinja2", extra="report", for_="writing HTML reports")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(name), require("markupsafe", extra="report", for_="HTML reports").Markup
