"""The page of `explain --html`: an automaton, its verdicts, and a network that runs in the browser."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from statetrack.automata import DFA, Explanation, Verdict, compile_dfa
from statetrack.automata.explain import NOT_JUDGED
from statetrack.automata.export import network
from statetrack.errors import UserError
from statetrack.experiments.verdicts import MULTIPLES, Measured
from statetrack.files import write_text
from statetrack.report.page import TEMPLATES, template

DRAWN_STATES = 40
MAX_LEVELS, MAX_LEVEL_SIZE = 24, 64
CONTEXTS, NUMBERS = 20_000, 300_000  # limits that keep a page below a few megabytes
TRIED_STATES = 16  # with more states only the automatic strategy is compiled
LONGEST_WORD = 5_000
EXPLAINED_LETTERS = 12  # whose permutations are written out
WITNESS_REPEATS = 6

TITLES = {
    "group": "permutation matrices (Theorem 3)",
    "cyclic": "rotations (Theorem 3)",
    "reflections": "two layers of reflections (Appendix D)",
    "excluded": "excluded-state cascade (Theorem 4)",
    "holonomy": "holonomy cascade (Theorem 4)",
    "auto": "nothing to track",
}


def write_automaton_page(
    path: Path, title: str, found: Explanation, measured: list[Measured], train_length: int
) -> None:
    """Write a self-contained page: fonts, scripts and pictures are not loaded from elsewhere."""
    page, markupsafe = template("automaton.html")
    networks, left_out = page_networks(found.dfa)
    dfa = found.dfa
    data = {
        "dfa": json.loads(dfa.to_json()),
        "networks": networks,
        "example": example_word(dfa),
        "longest": LONGEST_WORD,
    }
    text = page.render(
        title=title,
        lead=_lead(found),
        conclusion=_conclusion(found),
        cheapest=found.cheapest.name,
        not_judged=NOT_JUDGED,
        alphabet=list(dfa.alphabet),
        letters=letter_cycles(dfa),
        states=dfa.n_states,
        drawn_limit=DRAWN_STATES,
        svg=markupsafe(dfa.to_svg()) if dfa.n_states <= DRAWN_STATES else None,
        networks=networks,
        left_out=left_out,
        verdicts=[_verdict(v, found) for v in found.verdicts],
        measured=[row.to_dict() | {"name": row.verdict.model.name} for row in measured],
        guess=measured[0].guess if measured else [],
        columns=[f"{m}x = {m * train_length}" for m in MULTIPLES],
        facts=found.summary(),
        data=data,
        css=markupsafe((TEMPLATES / "automaton.css").read_text(encoding="utf-8")),
        engine=markupsafe((TEMPLATES / "network.js").read_text(encoding="utf-8")),
        script=markupsafe(
            "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in ("automaton.js", "levels.js"))
        ),
    )
    write_text(path, text + "\n")


def page_networks(dfa: DFA) -> tuple[list[dict[str, Any]], list[str]]:
    """The networks small enough for a page, the automatic choice first, and why others were left out."""
    networks: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    small = dfa.n_states <= TRIED_STATES
    for strategy in ("auto", *(("group", "cyclic", "reflections", "excluded", "holonomy") if small else ())):
        try:
            compiled = compile_dfa(dfa, strategy, "float64")
        except UserError:
            continue  # this strategy does not apply to the automaton
        chosen, sizes = compiled.strategy, [layer.size for layer in compiled.layers]
        if chosen in networks or (strategy != "auto" and not sizes):
            continue
        if len(sizes) > MAX_LEVELS or max(sizes, default=0) > MAX_LEVEL_SIZE:
            left_out[chosen] = (
                f"{len(sizes)} level{'s' if len(sizes) > 1 else ''} with vectors up to {max(sizes)} long"
            )
            continue
        try:
            plain = network(compiled, cap=CONTEXTS, numbers=NUMBERS)
        except UserError:
            left_out[chosen] = "it has too many contexts for a page"
            continue
        networks[chosen] = _for_page(plain, sizes)
    return list(networks.values()), [f"the {TITLES[name]}: {why}" for name, why in left_out.items()]


def _for_page(plain: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    """The fields the page uses. A level is one-hot if its largest entry marks the level's state."""
    shape = f", {len(sizes)} level{'s' if len(sizes) > 1 else ''} of size {', '.join(map(str, sizes))}"
    levels = []
    for level in plain["levels"]:
        actions = [{key: a[key] for key in a if key != "factors"} for a in level["actions"]]
        one_hot = level["codebook"] == [
            [int(i == j) for j in range(level["size"])] for i in range(level["size"])
        ]
        levels.append(level | {"actions": actions, "contains_states": one_hot})
    return {"title": TITLES[plain["strategy"]] + (shape if sizes else ""), "levels": levels}


def example_word(dfa: DFA, length: int = 10) -> str:
    """A word that contains every letter and visits many states, in the page's input format."""
    if not dfa.alphabet:
        return ""
    word, state, seen = [], dfa.start, {dfa.start: 1}
    for t in range(length):
        # Prefer the least visited target, then the letters in turn.
        turn = [*dfa.alphabet[t % len(dfa.alphabet) :], *dfa.alphabet[: t % len(dfa.alphabet)]]
        letter = min(turn, key=lambda a: seen.get(dfa.transitions[a][state], 0))
        state = dfa.transitions[letter][state]
        seen[state] = seen.get(state, 0) + 1
        word.append(letter)
    return spell(tuple(word), dfa)


def letter_cycles(dfa: DFA) -> list[tuple[str, str]]:
    """Every letter with the cycles in which it permutes the states. Empty if one does not, or for many."""
    tables = [(letter, dfa.transitions[letter]) for letter in dfa.alphabet[:EXPLAINED_LETTERS]]
    if dfa.n_states > DRAWN_STATES or any(sorted(table) != list(range(dfa.n_states)) for _, table in tables):
        return []
    return [(letter, _cycles(table)) for letter, table in tables]


def _cycles(permutation: Sequence[int]) -> str:
    """Cycle notation, without fixed points: [1, 0, 2] is (0 1)."""
    seen: set[int] = set()
    found = []
    for first in range(len(permutation)):
        cycle = [first]
        while (following := permutation[cycle[-1]]) != first:
            cycle.append(following)
        if len(cycle) > 1 and first not in seen:
            found.append(f"({' '.join(map(str, cycle))})")
        seen |= {*cycle}
    return "".join(found) or "the identity"


def spell(word: tuple[str, ...], dfa: DFA) -> str:
    return ("" if all(len(letter) == 1 for letter in dfa.alphabet) else " ").join(word)


def _verdict(v: Verdict, found: Explanation) -> dict[str, Any]:
    w = v.witness
    return {
        "name": v.model.name,
        "answer": v.answer,
        "reason": v.reason,
        "source": v.source,
        "derived": v.derived,
        "witness": "" if w is None else w.shape(),
        "note": "" if w is None else w.note(),
        "word": "" if w is None else spell(tuple(w.example(WITNESS_REPEATS)[:LONGEST_WORD]), found.dfa),
        "cheapest": v.model is found.cheapest,
    }


def _conclusion(found: Explanation) -> str:
    """The beginning of a sentence that ends with the cheapest class."""
    label, _ = found.conclusion()
    if label.startswith("no "):
        return "No small class of linear RNNs is proven to track it at every length; one that does is"
    return f"To track it at every length with a linear RNN, the {label} is"


def _lead(found: Explanation) -> str:
    a, letters = found.analysis, found.dfa.alphabet
    shown = ", ".join(letters[:20]) + (", ..." if len(letters) > 20 else "")
    over = (
        f"over the letter{'s' if len(letters) > 1 else ''} {shown}" if letters else "over an empty alphabet"
    )
    states = f"{a.states_min} state{'s' if a.states_min != 1 else ''}"
    given = f", {a.states} as given" if a.states != a.states_min else ""
    return f"A minimal automaton of {states}{given}, {over}."
