"""statetrack compile: an automaton as the exact weights of a linear RNN."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from statetrack.automata import CompiledLRNN, compile_dfa
from statetrack.automata.export import SUFFIXES, describe_action, network, read_word, save_network
from statetrack.commands.automaton import AutomatonOptions, read_automaton
from statetrack.commands.flags import parse
from statetrack.errors import UserError

SHOWN_LEVELS, SHOWN_ACTIONS = 12, 4


@dataclass(frozen=True)
class CompileOptions:
    """Weights of a linear RNN that tracks the automaton exactly, as generalised Householder factors."""

    automaton: AutomatonOptions = field(default_factory=AutomatonOptions)  # which language
    strategy: str = "auto"  # auto, group, cyclic, reflections, excluded or holonomy
    dtype: str = "float32"  # float16, float32 or float64
    minimise: bool = False  # compile the minimal automaton instead of the one given
    word: str | None = None  # run the network on this word and compare with the automaton
    out: Path | None = None  # save to FILE.safetensors (a module's weights) or FILE.json (plain matrices)
    json: bool = False  # print JSON instead of text


def main(arguments: Sequence[str]) -> None:
    options = parse(CompileOptions, arguments, "statetrack compile")
    if options.out is not None and options.out.suffix not in SUFFIXES:
        raise UserError(f"--out is {options.out}, expected a file that ends in .json or .safetensors.")
    name, dfa = read_automaton(options.automaton)
    compiled = compile_dfa(dfa, options.strategy, options.dtype, minimise=options.minimise)
    word = None if options.word is None else read_word(options.word, compiled.dfa.alphabet)
    if options.json:
        record: dict[str, Any] = {"name": name, **network(compiled)}
        if word is not None:
            record["word"] = _run(compiled, word)
        print(json.dumps(record))
    else:
        print(f"{name}\n\n{_summary(compiled)}")
        if word is not None:
            print(f"\n{_steps(compiled, word)}")
    if options.out is not None:
        save_network(compiled, options.out)
        if not options.json:
            print(f"\nSaved to {options.out}")


def _summary(compiled: CompiledLRNN) -> str:
    """Sizes, actions and factors of every level; complete if the network can be tabulated."""
    dfa, complete = compiled.dfa, True
    try:
        compiled.tables()
    except UserError:
        complete = False
        compiled.states(dfa.alphabet * 20)
    sizes = [layer.size for layer in compiled.layers]
    lines = [
        f"automaton     {dfa.n_states} states over {' '.join(dfa.alphabet) or 'no letters'}",
        f"strategy      {compiled.strategy}, {compiled.dtype}",
        f"layers        {len(sizes)}"
        + (f" of state size {', '.join(map(str, sizes[:12]))}" if sizes else "")
        + (", ..." if len(sizes) > 12 else ""),
        f"Householders  at most {compiled.householders} per token",
    ]
    if not sizes:
        lines.append("              nothing to track: the decoder is constant")
    if not complete:
        lines.append("              (as far as met on one short word: too many contexts to tabulate ahead)")
    for layer in compiled.layers[:SHOWN_LEVELS]:
        count = f"{len(layer.actions)} transition{'s' if len(layer.actions) != 1 else ''}"
        lines.append(f"\n{layer.name}: {count} on {layer.size} coordinate{'s' if layer.size != 1 else ''}")
        for action in layer.actions[:SHOWN_ACTIONS]:
            number = len(action.factors())
            factors = f"{number:>3} factor" + (" " if number == 1 else "s")
            lines.append(f"  {factors}  {describe_action(action)}"[:100])
        if len(layer.actions) > SHOWN_ACTIONS:
            lines.append(f"  and {len(layer.actions) - SHOWN_ACTIONS} more")
    if len(sizes) > SHOWN_LEVELS:
        lines.append(f"\nand {len(sizes) - SHOWN_LEVELS} more levels")
    return "\n".join(lines)


def _run(compiled: CompiledLRNN, word: list[str]) -> dict[str, Any]:
    states = compiled.states(word)
    return {
        "letters": word,
        "states": states,
        "accepted": states[-1] in compiled.dfa.accepting,
        "agrees": states == compiled.dfa.run(word),
    }


def _steps(compiled: CompiledLRNN, word: list[str]) -> str:
    """One line per letter: the state vector of every level, and the decoded state."""
    done, traces = _run(compiled, word), compiled.trace(word)
    width = max([6, *map(len, word)])
    lines = [f"{'letter':<{width}}  state  level states"]
    for t, (letter, state) in enumerate(zip(["start", *word], done["states"], strict=True)):
        vectors = [trace.layer.H0 if t == 0 else trace.states[t - 1] for trace in traces]
        shown = "  ".join("(" + " ".join(f"{x:.3g}" for x in vector) + ")" for vector in vectors)
        lines.append(f"{letter:<{width}}  {state:>5}  {shown if len(shown) < 84 else shown[:80] + ' ...'}")
    agrees = "the automaton agrees at every step" if done["agrees"] else "THE AUTOMATON DISAGREES"
    return "\n".join([*lines, "", f"{'accepted' if done['accepted'] else 'rejected'}; {agrees}"])
