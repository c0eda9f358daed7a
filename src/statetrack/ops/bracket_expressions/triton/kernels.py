"""Random bracketed expressions in one kernel: a lane expands and evaluates one expression.

The grammar and the rules for values are those of `bracket_expressions_reference`. Grid: one program for every
BLOCK expressions. In registers: the pair (s, p) of the innermost open bracket and the heights of both stacks;
the stacks themselves lie in `stack` and `pairs`, where only their own lane reads and writes.
"""

import triton
import triton.language as tl


@triton.jit
def bracket_expressions_kernel(
    sizes, digits, operators, splits, tokens, values, stack, pairs, B, T,
    MODULUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < B
    row = b.to(tl.int64) * T
    size = tl.load(sizes + b, mask=inside, other=0)
    item, top = size, tl.zeros((BLOCK,), tl.int64)  # the item on top is kept in a register
    level, s, p = top, top, top + 1
    t = 0
    while t < T:
        going = inside & (t < size)
        digit = tl.load(digits + row + t, mask=going, other=0)
        operator = tl.load(operators + row + t, mask=going, other=0)
        split = tl.load(splits + row + t, mask=going, other=0.0)
        is_digit, is_sign, is_operator = item == 1, item == 2, item == -1
        opens, closes, branches = item >= 3, item == 0, item >= 5
        token = tl.where(is_sign, MODULUS + 1, digit)
        token = tl.where(opens, MODULUS + 3, tl.where(closes, MODULUS + 4, token))
        token = tl.where(is_operator, MODULUS + operator, token)
        tl.store(tokens + row + t, token, mask=going)
        # the value so far; a pair is stored as s m + p
        inner = (s + p) % MODULUS
        level = tl.where(closes, level - 1, level)
        kept = tl.load(pairs + row + level, mask=going & closes, other=0)
        tl.store(pairs + row + level, s * MODULUS + p, mask=going & opens)
        level = tl.where(opens, level + 1, level)
        adds = is_operator & (operator < 2)
        factor = tl.where(is_digit, digit, tl.where(is_sign, MODULUS - 1, 1))
        next_s = tl.where(adds, s + p, tl.where(closes, kept // MODULUS, tl.where(opens, 0, s)))
        next_p = tl.where(adds, tl.where(operator == 1, MODULUS - 1, 1), p * factor)
        next_p = tl.where(closes, inner * (kept % MODULUS), tl.where(opens, 1, next_p))
        s, p = tl.where(going, next_s % MODULUS, s), tl.where(going, next_p % MODULUS, p)
        # what follows: below the next item lie, of a branching expression, the operator, the right side and
        # the closing bracket; of another bracketed one the closing bracket
        left = 1 + (split * (item - 4).to(tl.float64)).to(tl.int64)
        at = stack + row + top
        tl.store(at, tl.zeros_like(item), mask=going & opens)
        tl.store(at + 1, item - 3 - left, mask=going & branches)
        tl.store(at + 2, tl.zeros_like(item) - 1, mask=going & branches)
        pops = going & (is_digit | is_operator | closes) & (top > 0)
        below = tl.load(at - 1, mask=pops, other=0)
        after = tl.where(branches, left, tl.where(opens, item - 2, tl.where(is_sign, 1, below)))
        item = tl.where(going, after, item)
        top += tl.where(going, tl.where(branches, 3, tl.where(opens, 1, tl.where(pops, -1, 0))), 0)
        t += 1
    tl.store(values + b, (s + p) % MODULUS, mask=inside)
