"""Regular languages and linear RNNs: compile an automaton to exact weights, explain what can track it.

    dfa = DFA.from_regex("(ab|ba)*", "ab")
    analyse(dfa)                      sizes, groups, Householder factors per letter
    compile_dfa(dfa).states("abba")   the automaton's states, computed by a linear recurrence
    compile_dfa(dfa).to_module()      the same as an nn.Module on the library's delta rule
    print(explain(dfa).text())        which model classes can track it, theorem by theorem
    compile_gates(dfa).states("abba") the states, by diagonal layers with signs or turns; also in one layer
                                      (compile_one_layer), and by rotations (compile_rotations)
    factor(M)                         a matrix as generalised Householder factors
    obstruct.parity(A)                whether Theorem 1 excludes parity for A, with finite-precision states

The proofs are in docs/theory.md, the commands in docs/automata.md.
"""

from statetrack.automata import obstruct
from statetrack.automata.analysis import Analysis, analyse
from statetrack.automata.compiler import CompiledLRNN, compile_dfa
from statetrack.automata.dfa import DFA
from statetrack.automata.explain import Explanation, Verdict, explain
from statetrack.automata.factor import Factorisation, factor
from statetrack.automata.gate_network import GateNetwork, compile_gates
from statetrack.automata.group_witness import GroupWitness
from statetrack.automata.one_layer import MergeWitness
from statetrack.automata.one_layer_network import OneLayerNetwork, compile_one_layer
from statetrack.automata.regex import RegexError
from statetrack.automata.rotation_network import RotationNetwork, compile_rotations
from statetrack.automata.witness import Witness

__all__ = [
    "DFA",
    "Analysis",
    "CompiledLRNN",
    "Explanation",
    "Factorisation",
    "GateNetwork",
    "GroupWitness",
    "MergeWitness",
    "OneLayerNetwork",
    "RegexError",
    "RotationNetwork",
    "Verdict",
    "Witness",
    "analyse",
    "compile_dfa",
    "compile_gates",
    "compile_one_layer",
    "compile_rotations",
    "explain",
    "factor",
    "obstruct",
]
