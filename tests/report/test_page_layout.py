"""Pages fit a telephone: in Chromium, and by the marks that make them fit, where there is no Chromium."""

from html.parser import HTMLParser

import pytest

from statetrack.automata import DFA, explain
from statetrack.experiments.tab_chomsky import PARITY
from statetrack.experiments.verdicts import Measured
from statetrack.experiments.verdicts import runs as verdict_runs
from statetrack.report.automaton_page import write_automaton_page
from statetrack.report.build import write_overview, write_report
from statetrack.report.figures import Curve, Panel, panel_pictures
from statetrack.report.page import embedded, write_page
from statetrack.report.results import read_index
from statetrack.report.results_page import write_results_page

EMPTY = {"img", "meta", "br", "input", "link", "path", "circle", "line"}


class Layout(HTMLParser):
    """The headings of a page, and what stands outside a frame that scrolls although it may be wide."""

    def __init__(self, page):
        super().__init__()
        self.open, self.headings, self.unframed = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        classes = (dict(attrs).get("class") or "").split()
        framed = any(name in ("wide", "pictures") for _, names in self.open for name in names)
        if tag in ("table", "img") and not framed:
            self.unframed.append(tag)
        if tag not in EMPTY:
            self.open.append((tag, classes))

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if self.open and self.open[-1][0] in ("h1", "h2", "figcaption") and data.strip():
            self.headings.append(data.strip())


@pytest.fixture(scope="module")
def pages(pretend_in, tmp_path_factory):
    """One of each kind of page."""
    tmp_path = tmp_path_factory.mktemp("pages")
    folder = pretend_in(tmp_path, "tab-chomsky", "quick", lambda run: 0.5, lambda run: run.panel == PARITY)
    results = read_index(folder)
    report = write_report(results, folder)
    overview = write_overview([(results, report)], tmp_path)
    _, everything = write_results_page([(results, report)], tmp_path / "page")
    curves = [Curve("DeltaNet", e, [8, 16, 32, 64], [1.0, 0.9, 0.6, 0.5]) for e in ("[0,1]", "[-1,1]")]
    panels = [Panel(title, curves, 16, 0.5) for title in ("Parity", "Swaps of five items (S5)")]
    row = {"task": "Swaps of five items (S5)", "model": "DeltaNet", "eigenvalues": "[-1,1]", "seconds": 3.0}
    write_page(
        tmp_path / "demo.html",
        "demo.html",
        pictures=[(p.title, embedded(svg)) for p, svg in zip(panels, panel_pictures(panels), strict=True)],
        title="The same linear RNN",
        lead="Every model saw 16 tokens.",
        columns=["1x = 16", "2x = 32", "4x = 64", "8x = 128"],
        rows=[row | {"values": [1.0, 0.9, 0.8, 0.7]}],
        note="Share of right labels.",
        machine="CPU",
        specs=[{"label": "one", "json": "{}" * 200}],
    )
    found = explain(DFA.from_group("S5"))
    measured = [
        Measured(r.verdict, r.model, [0.5] * 4, [0.25] * 4, "", 1.0) for r in verdict_runs(found, 1, 16)
    ]
    write_automaton_page(tmp_path / "automaton.html", "S5", found, measured, 16)
    return [report, overview, everything, tmp_path / "demo.html", tmp_path / "automaton.html"]


def test_pages_fit_a_wide_and_a_narrow_screen(pages, browser):
    for width in (1280, 400):
        for page in pages:
            assert browser.overflow(page, width) == [], f"{page.name} at {width} px"


def test_tables_and_figures_stand_in_frames_that_scroll_and_headings_once(pages):
    for page in pages:
        text = page.read_text()
        layout = Layout(text)
        assert layout.unframed == [], page
        assert 'name="viewport" content="width=device-width' in text
        assert text.count("<h1") == 1
        assert len(layout.headings) == len({*layout.headings}), f"{page}: {layout.headings}"
        assert "data:image/png" not in text, "figures are SVG, legible at any size"
