"""Bracketed expressions: grammar and values against Python's own parser, the kernel against the loop."""

import ast
import operator

import pytest
import torch
from sm90 import assert_fits, compile_sm90

from statetrack.errors import UserError
from statetrack.ops.bracket_expressions import bracket_expressions
from statetrack.ops.bracket_expressions.triton.backend import LAUNCH

SYMBOLS = "01234+-*()"
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def draw(B: int, T: int, seed: int = 0, operators: int = 3, least: int = 1) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(least, T + 1, (B,), generator=generator)
    digits = torch.randint(5, (B, T), generator=generator)
    drawn = torch.randint(operators, (B, T), generator=generator)
    return sizes, digits, drawn, torch.rand((B, T), generator=generator, dtype=torch.float64)


def value(node: ast.expr) -> int:
    """The value of a parsed expression; brackets are gone, so a product binds as its brackets said."""
    if isinstance(node, ast.BinOp):
        return OPERATIONS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp):
        return -value(node.operand)
    assert isinstance(node, ast.Constant)
    return int(node.value)


def test_every_expression_is_python_with_the_value_that_python_gives_it():
    sizes, *drawn = draw(500, 37)
    tokens, values = bracket_expressions(sizes, *drawn, 5, backend="reference")
    for row, size, given in zip(tokens.tolist(), sizes.tolist(), values.tolist(), strict=True):
        text = "".join(SYMBOLS[token] for token in row[:size])
        assert value(ast.parse(text, mode="eval").body) % 5 == given, text


def test_short_expressions_are_a_digit_its_negative_and_both_in_brackets():
    sizes, digits = torch.tensor([1, 2, 3, 4]), torch.full((4, 4), 3)
    tokens, values = bracket_expressions(sizes, digits, digits * 0, digits * 0.0, 5)
    texts = [
        "".join(SYMBOLS[t] for t in row[:n]) for row, n in zip(tokens.tolist(), (1, 2, 3, 4), strict=True)
    ]
    assert texts == ["3", "-3", "(3)", "(-3)"]
    assert values.tolist() == [3, 2, 3, 2]


@pytest.mark.parametrize(
    ("split", "text"), [(0.0, "(2+(2+(2)))"), (0.999999, "(((2)+2)+2)"), (0.5, "((-2)+(2))")]
)
def test_a_split_gives_the_left_side_its_length(split, text):
    digits = torch.full((1, len(text)), 2)
    tokens, _ = bracket_expressions(torch.tensor([len(text)]), digits, digits * 0, digits * 0 + split, 5)
    assert "".join(SYMBOLS[t] for t in tokens[0].tolist()) == text


@pytest.mark.parametrize(("B", "T"), [(1, 1), (33, 5), (70, 37), (5, 253)])
def test_the_kernel_gives_the_tokens_and_values_of_the_loop(B, T):
    inputs = draw(B, T, seed=T)
    expected = bracket_expressions(*inputs, 5, backend="reference")
    actual = bracket_expressions(*inputs, 5, backend="triton")
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y)


def test_what_lies_past_an_expression_keeps_its_digit():
    sizes, digits, *rest = draw(20, 30)
    tokens, _ = bracket_expressions(sizes, digits, *rest, 5)
    past = torch.arange(30) >= sizes[:, None]
    assert torch.equal(tokens[past], digits[past])


def test_shapes_that_do_not_fit_are_named():
    sizes, digits, operators, splits = draw(3, 8)
    with pytest.raises(UserError, match=r"splits \(3, 7\), expected \(B,\) and three of \(B, T\)"):
        bracket_expressions(sizes, digits, operators, splits[:, 1:], 5)


def test_the_kernel_compiles_for_sm_90_with_one_expression_per_thread():
    """A lane reads what it wrote: were a value held by two threads, one could read before the other wrote."""
    pointers = ["sizes", "digits", "operators", "tokens", "values", "stack", "pairs"]
    types = dict.fromkeys(pointers, "*i64") | {"splits": "*fp64", "B": "i32", "T": "i32"}
    compiled = compile_sm90(
        "statetrack.ops.bracket_expressions.triton.kernels:bracket_expressions_kernel",
        types,
        {"MODULUS": 5, "BLOCK": LAUNCH["BLOCK"]},
        LAUNCH["num_warps"],
    )
    assert_fits(compiled)
    assert compiled.shared == 0  # nothing moves between threads
    assert LAUNCH["BLOCK"] == 32 * LAUNCH["num_warps"]
