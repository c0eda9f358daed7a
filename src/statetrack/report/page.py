"""Self-contained HTML pages: the pictures are inside, nothing is fetched."""

import base64
from pathlib import Path
from typing import Any

from statetrack.errors import require
from statetrack.files import write_text

TEMPLATES = Path(__file__).parent / "templates"


def write_page(path: Path, template: str, *, figure: bytes, **values: Any) -> None:
    """Fill a template; every value is escaped."""
    jinja2 = require("jinja2", extra="report", for_="writing HTML reports")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    encoded = base64.b64encode(figure).decode()
    write_text(path, environment.get_template(template).render(figure=encoded, **values) + "\n")
