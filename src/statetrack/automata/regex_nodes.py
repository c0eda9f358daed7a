"""Regular expressions as shared trees, with Brzozowski's derivative."""

from collections.abc import Iterable, Sequence


class Node:
    """One expression. Equal expressions are the same object, so `is` and hashing by identity suffice.

    `kind` is "letters" (items: a frozenset of letters, the empty one matching nothing), "empty" (the empty
    word), "concat" (items: head and tail), "union" (items: a frozenset of nodes) or "star" (items: one node).
    """

    __slots__ = ("derivatives", "items", "kind", "nullable", "size")

    def __init__(self, kind: str, items, nullable: bool, size: int):
        self.kind, self.items, self.nullable, self.size = kind, items, nullable, size
        self.derivatives: dict[str, Node] = {}


class TooComplex(Exception):
    """The derivatives of an expression exceed the limit on work."""


class Builder:
    """Makes expressions over one alphabet, simplified just enough for finitely many derivatives."""

    work_cap = 4_000_000  # limit on members of unions examined; a few seconds

    def __init__(self, alphabet: tuple[str, ...]):
        self.alphabet, self.known = alphabet, frozenset(alphabet)
        self._nodes: dict[tuple, Node] = {}
        self._work = 0
        self.nothing = self.letters(())
        self.empty = self._node("empty", (), True, 1)
        self.everything = self.star(self.letters(alphabet))

    def _node(self, kind: str, items, nullable: bool, size: int) -> Node:
        key = (kind, items)
        if key not in self._nodes:
            self._nodes[key] = Node(kind, items, nullable, size)
        return self._nodes[key]

    def letters(self, letters: Iterable[str]) -> Node:
        """Any one of the letters."""
        return self._node("letters", frozenset(letters), False, 1)

    def star(self, node: Node) -> Node:
        """Any number of repetitions."""
        if node is self.nothing or node is self.empty:
            return self.empty
        if node.kind == "star":
            return node
        return self._node("star", (node,), True, node.size + 1)

    def union(self, nodes: Iterable[Node]) -> Node:
        """One of the nodes; associative, commutative and idempotent by construction."""
        members, letters = set(), set()
        stack = list(nodes)
        while stack:
            node = stack.pop()
            self._work += 1
            if self._work > self.work_cap:
                raise TooComplex
            if node.kind == "union":
                stack.extend(node.items)
            elif node.kind == "letters":
                letters |= node.items
            else:
                members.add(node)
        if self.everything in members:
            return self.everything
        if letters:
            members.add(self.letters(letters))
        if self.empty in members and any(m.nullable for m in members if m is not self.empty):
            members.remove(self.empty)
        if not members:
            return self.nothing
        if len(members) == 1:
            return members.pop()
        nullable = any(m.nullable for m in members)
        return self._node("union", frozenset(members), nullable, 1 + sum(m.size for m in members))

    def concat(self, nodes: Sequence[Node]) -> Node:
        """The nodes one after the other, nested to the right."""
        result = self.empty
        for node in reversed(nodes):
            result = self._join(node, result)
        return result

    def _join(self, left: Node, right: Node) -> Node:
        if left is self.nothing or right is self.nothing:
            return self.nothing
        if right is self.empty:
            return left
        heads = []
        while left.kind == "concat":
            heads.append(left.items[0])
            left = left.items[1]
        if left is not self.empty:
            heads.append(left)
        for head in reversed(heads):
            right = self._node(
                "concat", (head, right), head.nullable and right.nullable, 1 + head.size + right.size
            )
        return right

    def repeat(self, node: Node, low: int, high: int | None) -> Node:
        """Between `low` and `high` repetitions; None means no upper bound."""
        if high is None:
            return self.concat([node] * low + [self.star(node)])
        if node.kind == "star":
            return node if high else self.empty
        if node.kind == "union" and self.empty in node.items:
            node, low = self.union(node.items - {self.empty}), 0  # (x?){m,n} = x{0,n}
        if node.nullable:
            return self.concat([node] * high)
        # x{0,3} as (x(x(x)?)?)?: linear in size, and one derivative per letter read.
        optional = self.empty
        for _ in range(high - low):
            optional = self.union([self.empty, self._join(node, optional)])
        return self.concat([node] * low + [optional])

    def derivative(self, node: Node, letter: str) -> Node:
        """What may follow `letter` in a word of the expression."""
        if letter not in node.derivatives:
            node.derivatives[letter] = self._derivative(node, letter)
        return node.derivatives[letter]

    def _derivative(self, node: Node, letter: str) -> Node:
        if node.kind == "letters":
            return self.empty if letter in node.items else self.nothing
        if node.kind == "empty":
            return self.nothing
        if node.kind == "star":
            return self._join(self.derivative(node.items[0], letter), node)
        if node.kind == "union":
            return self.union([self.derivative(member, letter) for member in node.items])
        branches = []
        while node.kind == "concat":
            head, tail = node.items
            branches.append(self._join(self.derivative(head, letter), tail))
            if not head.nullable:
                return self.union(branches)
            node = tail
        return self.union([*branches, self.derivative(node, letter)])
