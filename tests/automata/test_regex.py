"""Regular expressions against Python's own `re` and against automata-lib."""

import re
from itertools import product

import pytest
from automata.fa.dfa import DFA as OracleDFA
from automata.fa.nfa import NFA as OracleNFA
from hypothesis import given, settings
from hypothesis import strategies as st

from statetrack.automata import DFA, RegexError
from statetrack.errors import UserError

WORDS = ["".join(w) for n in range(6) for w in product("abc", repeat=n)]
ATOMS = ["a", "b", "c", ".", "[ab]", "[^a]", "[a-b]", "(?:)", "(|a)", r"\w", r"\D", r"\x61", r"[\w]"]
QUANTIFIERS = ["*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "{0}"]

patterns = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda p: f"({p[0]}|{p[1]})"),
        st.tuples(inner, st.sampled_from(QUANTIFIERS)).map(lambda p: f"(?:{p[0]}){p[1]}"),
    ),
    max_leaves=8,
)


@settings(max_examples=150)
@given(pattern=patterns)
def test_accepts_what_re_fullmatch_accepts(pattern):
    dfa, oracle = DFA.from_regex(pattern, "abc"), re.compile(pattern)
    assert [dfa.accepts(w) for w in WORDS] == [oracle.fullmatch(w) is not None for w in WORDS]


@pytest.mark.parametrize(
    "pattern",
    [
        "a{",
        "a{}",
        "a{x}",
        "a{1,x}",
        "]",
        "}",
        "a]b}",
        "[]a]",
        "[^]a]",
        "[a-]",
        r"\.",
        "[.]",
        r"\n.",
        "a|",
        "|",
    ],
)
def test_odd_literals_read_as_in_python(pattern):
    alphabet = "ab{}x1,].-\n"
    dfa, oracle = DFA.from_regex(pattern, alphabet), re.compile(pattern)
    words = ["".join(w) for n in range(4) for w in product(alphabet, repeat=n)] + ["a{x}", "a{1,x}", "a]b}"]
    assert [dfa.accepts(w) for w in words] == [oracle.fullmatch(w) is not None for w in words]


@pytest.mark.parametrize(
    "pattern", ["(ab|ba)*", "a*b*c*", "(a|b)*a(a|b)(a|b)(a|b)", "(aa|b)*c?", "((a|b)(a|b)(a|b))*"]
)
def test_minimal_size_agrees_with_automata_lib(pattern):
    ours = DFA.from_regex(pattern, "abc")
    theirs = (
        OracleDFA.from_nfa(OracleNFA.from_regex(pattern, input_symbols=set("abc"))).to_complete().minify()
    )
    assert ours.n_states == len(theirs.states)


def test_512_states_come_at_once():
    assert DFA.from_regex("(a|b)*a(a|b){8}", "ab").n_states == 512


@pytest.mark.parametrize(
    ("pattern", "position", "words"),
    [
        ("ab|(a", 3, "never closed"),
        ("a)", 1, "closes no group"),
        ("*a", 0, "nothing to repeat"),
        ("a|{2}", 2, "nothing to repeat"),
        ("a**", 2, "quantifier follows"),
        ("a*?", 2, "lazy"),
        ("a++", 2, "possessive"),
        ("a[ab", 1, "never closed"),
        (r"(a)\1", 3, "back-reference"),
        ("b(?=a)", 1, "look-ahead"),
        ("b(?<!a)", 1, "negative look-behind"),
        ("(?P<x>a)", 0, "named group"),
        ("(?i)a", 0, "extension"),
        ("^a", 0, "anchor"),
        (r"a\b", 1, "anchor"),
        (r"a\q", 1, "escape"),
        ("abx", 2, "'x' is not in the alphabet"),
        ("a[bx]", 3, "'x' is not in the alphabet"),
        ("[b-a]", 1, "range"),
        ("[0-9]", 1, "no letter of the alphabet"),
        ("a{3,2}", 1, "minimum 3 above its maximum 2"),
        ("a{9999}", 1, "2000"),
        ("((a{900}){900}){9}", 9, "too long"),
        ("a\\", 1, "backslash"),
        (r"\xg1", 0, "hexadecimal"),
        ("(" * 150 + "a" + ")" * 150, 101, "nested"),
    ],
)
def test_errors_point_at_the_character(pattern, position, words):
    with pytest.raises(RegexError, match=re.escape(words)) as caught:
        DFA.from_regex(pattern, "ab")
    assert caught.value.position == position
    shown, caret = str(caught.value).splitlines()[-2:]
    assert shown[caret.index("^")] == pattern[position]


def test_too_many_states_is_an_error_not_a_hang():
    with pytest.raises(UserError, match="more than 20000 states"):
        DFA.from_regex("(a|b)*a(a|b){25}", "ab")


def test_letters_of_a_regex_are_single_characters():
    with pytest.raises(UserError, match="'ab' has 2 characters"):
        DFA.from_regex("a", ["ab", "c"])


@pytest.mark.parametrize(("pattern", "states"), [("(a*){2000}", 2), ("(a?){1500}", 1502), ("(a|){3,9}", 11)])
def test_repeated_options_stay_small(pattern, states):
    assert DFA.from_regex(pattern, "ab").n_states == states


def test_tangled_repetition_is_an_error_not_a_hang():
    with pytest.raises(UserError, match="repeats too much"):
        DFA.from_regex("(a*b?a?){1500}", "ab")
