"""The automaton a command is about: a regex, a file or a group by name."""

from dataclasses import dataclass
from pathlib import Path

from statetrack.automata.dfa import DFA
from statetrack.automata.named import group_name
from statetrack.errors import UserError


@dataclass(frozen=True)
class AutomatonOptions:
    """Give one of --regex (with --alphabet), --dfa and --group."""

    regex: str | None = None  # syntax of re.fullmatch, without back-references and look-around
    alphabet: str | None = None  # the letters a regex is over, such as ab
    dfa: Path | None = None  # JSON file: alphabet, transitions, start, accepting
    group: str | None = None  # S5, A5, Z7, D4, Q8, M11: where is one point? (not `--task s5`: the product)


def read_automaton(given: AutomatonOptions) -> tuple[str, DFA]:
    """The name the user gave, and the automaton."""
    chosen = [name for name in ("regex", "dfa", "group") if getattr(given, name) is not None]
    if len(chosen) != 1:
        found = "none" if not chosen else " and ".join(f"--{name}" for name in chosen)
        raise UserError(f"expected one of --regex, --dfa and --group, found {found}.")
    if given.regex is None and given.alphabet is not None:
        raise UserError(f"--alphabet belongs to --regex; --{chosen[0]} brings its own.")
    if given.regex is not None:
        if given.alphabet is None:
            letters = "".join(sorted(set(filter(str.isalnum, given.regex)))) or "ab"
            raise UserError(f"--regex needs the letters it is over, here perhaps --alphabet {letters}.")
        return given.regex or "the empty word", DFA.from_regex(given.regex, given.alphabet)
    if given.dfa is not None:
        return given.dfa.name, DFA.load(given.dfa)
    return group_name(str(given.group)), DFA.from_group(str(given.group))
