"""Regular expressions to automata: a parser for the regular part of Python's `re`, and derivatives."""

from statetrack.automata.regex_nodes import Builder, Node, TooComplex
from statetrack.errors import UserError

MAX_REPEAT = 2000
MAX_DEPTH = 100
MAX_STATES = 20_000

_EXTENSIONS = {
    "=": "look-ahead",
    "!": "negative look-ahead",
    "<=": "look-behind",
    "<!": "negative look-behind",
    "P<": "a named group",
    "P=": "a named back-reference",
    "#": "a comment",
    ">": "an atomic group",
    "(": "a conditional",
}
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_KINDS = {"d": str.isdecimal, "w": lambda c: c.isalnum() or c == "_", "s": str.isspace}


class RegexError(UserError):
    """A syntax error in a regular expression; `position` is the index of the character at fault."""

    def __init__(self, problem: str, pattern: str, position: int):
        self.position = position
        shown = "".join(c if c.isprintable() else "\N{MIDDLE DOT}" for c in pattern)
        super().__init__(f"regex: {problem} at position {position}.\n    {shown}\n    {' ' * position}^")


def compile_regex(pattern: str, alphabet: tuple[str, ...]) -> tuple[dict[str, list[int]], list[int]]:
    """The automaton of Brzozowski's derivatives: (letter -> next states, accepting states), start 0.

    The states are the expressions L_w = {v : wv in L}; with unions treated as sets there are finitely many of
    them, and the automaton is complete by construction.
    """
    for letter in alphabet:
        if len(letter) != 1:
            raise UserError(
                f"regex: letter {letter!r} has {len(letter)} characters; a regex needs one per letter."
            )
    build = Builder(alphabet)
    order = [parse(pattern, build)]
    index = {order[0]: 0}
    tables: dict[str, list[int]] = {letter: [] for letter in alphabet}
    for node in order:
        for letter in alphabet:
            try:
                target = build.derivative(node, letter)
            except TooComplex:
                raise UserError(
                    f"regex: {pattern!r} repeats too much to be turned into an automaton."
                ) from None
            if target not in index:
                if len(order) >= MAX_STATES:
                    raise UserError(
                        f"regex: {pattern!r} needs more than {MAX_STATES} states; shorten its repetitions."
                    )
                index[target] = len(order)
                order.append(target)
            tables[letter].append(index[target])
    return tables, [i for i, node in enumerate(order) if node.nullable]


def parse(pattern: str, build: Builder) -> Node:
    """The expression tree of a pattern, in the dialect of `re.fullmatch` without its irregular parts."""
    if not isinstance(pattern, str):
        raise UserError(f"regex: the pattern is a {type(pattern).__name__}, expected a string.")
    parser = _Parser(pattern, build)
    node = parser.alternation(depth=0)
    if parser.at < len(pattern):
        parser.fail("')' closes no group")
    return node


class _Parser:
    def __init__(self, pattern: str, build: Builder):
        self.pattern, self.build, self.at = pattern, build, 0

    def fail(self, problem: str, position: int | None = None):
        raise RegexError(problem, self.pattern, self.at if position is None else position)

    def peek(self, ahead: int = 0) -> str:
        return self.pattern[self.at + ahead : self.at + ahead + 1]

    def take(self) -> str:
        self.at += 1
        return self.pattern[self.at - 1]

    def alternation(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            self.fail(f"groups are nested more than {MAX_DEPTH} deep")
        branches = [self.sequence(depth)]
        while self.peek() == "|":
            self.take()
            branches.append(self.sequence(depth))
        return self.build.union(branches)

    def sequence(self, depth: int) -> Node:
        items = []
        while self.peek() not in ("", "|", ")"):
            items.append(self.repeated(self.atom(depth)))
        return self.build.concat(items)

    def repeated(self, node: Node) -> Node:
        start = self.at
        bounds = self.quantifier()
        if bounds is None:
            return node
        if self.peek() == "?":
            self.fail("a lazy quantifier is not supported (it matches the same words: drop the '?')")
        if self.peek() == "+":
            self.fail("a possessive quantifier is not supported")
        low, high = bounds
        if high is not None and low > high:
            self.fail(f"the repetition has its minimum {low} above its maximum {high}", start)
        if max(low, high or 0) > MAX_REPEAT:
            self.fail(f"the repetition counts past {MAX_REPEAT}", start)
        again = self.at
        if self.quantifier() is not None:
            self.fail("a quantifier follows a quantifier; put the first in parentheses", again)
        if node.size * max(low, high or 0) > 50 * MAX_REPEAT:
            self.fail("the repetitions multiply to too long an expression", start)
        return self.build.repeat(node, low, high)

    def quantifier(self) -> tuple[int, int | None] | None:
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if self.peek() in simple and self.peek():
            return simple[self.take()]
        if self.peek() != "{":
            return None
        # As in Python, a brace that opens no {m}, {m,}, {,n} or {m,n} is a literal.
        close = self.pattern.find("}", self.at)
        low, comma, high = self.pattern[self.at + 1 : close].partition(",") if close > 0 else ("x", "", "")
        if not all(part == "" or (part.isascii() and part.isdigit()) for part in (low, high)):
            return None
        if not low and not comma:
            return None
        self.at = close + 1
        if not comma:
            return int(low), int(low)
        return int(low or 0), int(high) if high else None

    def atom(self, depth: int) -> Node:
        start, c = self.at, self.peek()
        if c == "(":
            return self.group(depth)
        if c == "[":
            return self.build.letters(self.character_class())
        if c in ("^", "$"):
            self.fail(f"the anchor {c!r} is not supported (the whole word is matched anyway)")
        if c in ("*", "+", "?") or (c == "{" and self.quantifier() is not None):
            self.fail("a quantifier has nothing to repeat", start)
        self.take()
        if c == ".":
            return self.build.letters(a for a in self.build.alphabet if a != "\n")
        letters = self.escape(in_class=False) if c == "\\" else c
        return self.build.letters(self.known(letters, start) if isinstance(letters, str) else letters)

    def group(self, depth: int) -> Node:
        start = self.at
        self.take()
        if self.peek() == "?":
            if self.peek(1) != ":":
                rest = self.pattern[self.at + 1 :]
                names = [name for mark, name in _EXTENSIONS.items() if rest.startswith(mark)]
                self.fail(f"{(names or ['a (?...) extension'])[0]} is not supported", start)
            self.at += 2
        node = self.alternation(depth + 1)
        if self.peek() != ")":
            self.fail("'(' is never closed", start)
        self.take()
        return node

    def known(self, letter: str, position: int) -> str:
        if letter not in self.build.known:
            self.fail(f"letter {letter!r} is not in the alphabet {''.join(self.build.alphabet)!r}", position)
        return letter

    def escape(self, in_class: bool) -> str | set[str]:
        """What follows a backslash: one character, or a set of letters for \\d and the like."""
        start = self.at - 1
        if not self.peek():
            self.fail("the pattern ends in a backslash", start)
        c = self.take()
        if c.lower() in _KINDS:
            is_kind = _KINDS[c.lower()]
            return {a for a in self.build.alphabet if is_kind(a) == c.islower()}
        if c in _CONTROL:
            return _CONTROL[c]
        if c == "b" and in_class:
            return "\b"
        if c in ("b", "B", "A", "Z", "z") and not in_class:
            self.fail(f"the anchor '\\{c}' is not supported", start)
        if c in ("x", "u", "U"):
            return self.hexadecimal({"x": 2, "u": 4, "U": 8}[c], start)
        if c == "0" or (in_class and c in "01234567"):
            digits = c
            while len(digits) < 3 and self.peek() and self.peek() in "01234567":
                digits += self.take()
            return chr(int(digits, 8))
        if c.isdigit():
            self.fail(f"the back-reference '\\{c}' is not supported", start)
        if c.isascii() and c.isalpha():
            self.fail(f"the escape '\\{c}' is not known", start)
        return c

    def hexadecimal(self, digits: int, start: int) -> str:
        text = self.pattern[self.at : self.at + digits]
        if len(text) < digits or any(c not in "0123456789abcdefABCDEF" for c in text):
            self.fail(f"the escape needs {digits} hexadecimal digits", start)
        if int(text, 16) > 0x10FFFF:
            self.fail("the escape names no Unicode character", start)
        self.at += digits
        return chr(int(text, 16))

    def character_class(self) -> set[str]:
        opening, found = self.at, set()
        self.take()
        negated = self.peek() == "^"
        self.at += negated
        first = True
        while first or self.peek() != "]":
            first = False
            start, low = self.at, self.class_member(opening)
            if self.peek() == "-" and self.peek(1) not in ("]", ""):
                self.take()
                high = self.class_member(opening)
                found |= self.range(low, high, start)
            elif isinstance(low, str):
                found.add(self.known(low, start))
            else:
                found |= low
        self.take()
        return set(self.build.alphabet) - found if negated else found

    def class_member(self, opening: int) -> str | set[str]:
        if not self.peek():
            self.fail("'[' is never closed", opening)
        c = self.take()
        return self.escape(in_class=True) if c == "\\" else c

    def range(self, low: str | set[str], high: str | set[str], start: int) -> set[str]:
        text = self.pattern[start : self.at]
        if not isinstance(low, str) or not isinstance(high, str) or low > high:
            self.fail(f"the range {text!r} does not go from a character to a later one", start)
        inside = {a for a in self.build.alphabet if low <= a <= high}  # type: ignore[operator]
        if not inside:
            self.fail(
                f"the range {text!r} holds no letter of the alphabet {''.join(self.build.alphabet)!r}", start
            )
        return inside
