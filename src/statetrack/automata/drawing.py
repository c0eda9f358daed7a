"""Drawings of automata: Graphviz source, and an SVG with the states on a circle."""

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statetrack.automata.dfa import DFA

_NODE, _GAP = 20, 78  # radius of a state, and arc length reserved for each
_STYLE = (
    ".q{fill:#fff;stroke:#222;stroke-width:1.5}.acc{fill:none;stroke:#222}.edge{fill:none;stroke:#666;stroke-width:1.3}"
    ".name{font:13px sans-serif;text-anchor:middle;dominant-baseline:central}"
    ".label{font:12px sans-serif;text-anchor:middle;dominant-baseline:central;fill:#114;paint-order:stroke;"
    "stroke:#fff;stroke-width:4px}"
)


def edges(dfa: "DFA") -> dict[tuple[int, int], str]:
    """(source, target) -> the letters of that arrow, joined by commas."""
    letters: dict[tuple[int, int], list[str]] = {}
    for letter, table in dfa.transitions.items():
        for q, target in enumerate(table):
            letters.setdefault((q, target), []).append(letter)
    return {arrow: ",".join(found) for arrow, found in letters.items()}


def dfa_to_dot(dfa: "DFA") -> str:
    """Graphviz source: accepting states are double circles, a point marks the start."""
    lines = ["digraph dfa {", "  rankdir=LR;", "  start [shape=point];", f"  start -> {dfa.start};"]
    for q in range(dfa.n_states):
        lines.append(f"  {q} [shape={'doublecircle' if q in dfa.accepting else 'circle'}];")
    for (q, target), label in edges(dfa).items():
        quoted = label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines.append(f'  {q} -> {target} [label="{quoted}"];')
    return "\n".join([*lines, "}", ""])


def dfa_to_svg(dfa: "DFA") -> str:
    """A self-contained drawing: states on a circle (`id="state-0"` and so on), labelled arrows between."""
    n = dfa.n_states
    radius = 0 if n == 1 else max(90, n * _GAP / (2 * math.pi))
    side = 2 * (radius + 95)
    places = {
        q: (side / 2 + radius * math.cos(angle), side / 2 + radius * math.sin(angle))
        for q in range(n)
        for angle in [math.pi + 2 * math.pi * q / n]
    }
    all_edges = edges(dfa)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side:.0f} {side:.0f}" width="{side:.0f}" '
        f'height="{side:.0f}" role="img"><title>{escape(repr(dfa))}</title><style>{_STYLE}</style>',
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerUnits="userSpaceOnUse" '
        'markerWidth="9" markerHeight="9" orient="auto-start-reverse">'
        '<path d="M0 0L10 5L0 10z" fill="#666"/></marker></defs>',
    ]
    for (q, target), label in all_edges.items():
        if q == target:
            path, at = _loop(places[q], side / 2)
        else:
            path, at = _arrow(places[q], places[target], bend=(target, q) in all_edges or n == 2)
        parts.append(
            f'<path class="edge" data-from="{q}" data-to="{target}" d="{path}" marker-end="url(#tip)"/>'
        )
        parts.append(f'<text class="label" x="{at[0]:.1f}" y="{at[1]:.1f}">{escape(_shown(label))}</text>')
    x, y = places[dfa.start]
    dx, dy = _unit(x - side / 2, y - side / 2)
    if (dfa.start, dfa.start) in all_edges:
        # Beside the loop, not through it.
        dx, dy = 0.5 * dx + 0.866 * dy, 0.5 * dy - 0.866 * dx
    parts.append(
        f'<path class="edge" d="M{x + 58 * dx + 14 * dy:.1f} {y + 58 * dy - 14 * dx:.1f}'
        f'L{x + (_NODE + 2) * dx:.1f} {y + (_NODE + 2) * dy:.1f}" marker-end="url(#tip)"/>'
    )
    for q, (x, y) in places.items():
        ring = (
            f'<circle class="acc" cx="{x:.1f}" cy="{y:.1f}" r="{_NODE - 4}"/>' if q in dfa.accepting else ""
        )
        parts.append(
            f'<g id="state-{q}"><circle class="q" cx="{x:.1f}" cy="{y:.1f}" r="{_NODE}"/>{ring}'
            f'<text class="name" x="{x:.1f}" y="{y:.1f}">{q}</text></g>'
        )
    return "".join([*parts, "</svg>"])


def _shown(label: str) -> str:
    printable = "".join(c if c.isprintable() else "\N{MIDDLE DOT}" for c in label)
    return printable if len(printable) <= 24 else printable[:22] + "\N{HORIZONTAL ELLIPSIS}"


def _unit(dx: float, dy: float) -> tuple[float, float]:
    length = math.hypot(dx, dy)
    return (dx / length, dy / length) if length > 1e-9 else (-1.0, 0.0)


def _arrow(a: tuple[float, float], b: tuple[float, float], bend: bool) -> tuple[str, tuple[float, float]]:
    """A curve from circle a to circle b and the place of its label; two-way arrows bend apart."""
    (x0, y0), (x1, y1) = a, b
    dx, dy = _unit(x1 - x0, y1 - y0)
    lift = 34.0 if bend else 10.0
    cx, cy = (x0 + x1) / 2 - lift * dy, (y0 + y1) / 2 + lift * dx
    sx, sy = _unit(cx - x0, cy - y0)
    ex, ey = _unit(cx - x1, cy - y1)
    path = (
        f"M{x0 + _NODE * sx:.1f} {y0 + _NODE * sy:.1f}Q{cx:.1f} {cy:.1f} "
        f"{x1 + (_NODE + 1) * ex:.1f} {y1 + (_NODE + 1) * ey:.1f}"
    )
    # The label is placed nearer to the source, where fewer arrows cross.
    t = 0.42
    return path, tuple(
        (1 - t) ** 2 * p + 2 * t * (1 - t) * c + t * t * q for p, c, q in ((x0, cx, x1), (y0, cy, y1))
    )  # type: ignore[return-value]


def _loop(place: tuple[float, float], centre: float) -> tuple[str, tuple[float, float]]:
    """A loop on the outer side of a state."""
    x, y = place
    dx, dy = _unit(x - centre, y - centre)
    if dx == -1.0 and dy == 0.0 and abs(x - centre) < 1e-9:
        dx, dy = 0.0, -1.0
    ends = [(x + _NODE * (0.8 * dx - s * 0.6 * dy), y + _NODE * (0.8 * dy + s * 0.6 * dx)) for s in (-1, 1)]
    pulls = [(x + 58 * dx - s * 26 * dy, y + 58 * dy + s * 26 * dx) for s in (-1, 1)]
    (ax, ay), (bx, by), (cx, cy), (ex, ey) = ends[0], pulls[0], pulls[1], ends[1]
    path = f"M{ax:.1f} {ay:.1f}C{bx:.1f} {by:.1f} {cx:.1f} {cy:.1f} {ex:.1f} {ey:.1f}"
    return path, (x + 60 * dx, y + 60 * dy)
