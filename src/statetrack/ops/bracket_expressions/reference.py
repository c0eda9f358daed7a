"""Random bracketed expressions and their values, one token after the other, as a loop over a stack."""

import torch
from torch import Tensor

CLOSE, OPERATOR = 0, -1  # what a place on the stack stands for; n > 0 is an expression of n tokens


def bracket_expressions_reference(
    sizes: Tensor, digits: Tensor, operators: Tensor, splits: Tensor, modulus: int
) -> tuple[Tensor, Tensor]:
    """Expand an expression of n tokens by the grammar, and evaluate it modulo m on the way.

        E(1) = d    E(2) = - d    E(3) = ( d )    E(4) = ( E(2) )
        E(n) = ( E(l) op E(n - 3 - l) )        l = 1 + floor(split (n - 4)) for n >= 5

    Every open bracket has a pair (s, p), a sum and the signed product in progress; its value is s + p:

        digit d   p <- d p      + -   s <- s + p, p <- 1 or -1      (   a new pair (0, 1)
        sign -    p <- -p       *     nothing                       )   its value v as a digit: p <- v p

    Shapes: sizes (B,), all at least 1 and at most T; digits, operators (0 +, 1 -, 2 *) and splits in [0, 1)
    (B, T), each read at the position of the token it decides. Returns tokens (B, T) and values (B,). Tokens:
    digits 0 .. m - 1, then + - * ( ); what lies past an expression keeps its digit.
    """
    B, T = digits.shape
    plus, minus, opening, closing = modulus, modulus + 1, modulus + 3, modulus + 4
    row = torch.arange(B, device=digits.device)
    stack = torch.zeros((B, T + 4), dtype=torch.long, device=digits.device)
    pairs = torch.zeros((B, T + 1, 2), dtype=torch.long, device=digits.device)
    stack[:, 0], top = sizes, torch.zeros_like(row)
    level, s, p = torch.zeros_like(row), torch.zeros_like(row), torch.ones_like(row)
    tokens = digits.clone()
    for t in range(T):
        open_yet = t < sizes
        item = torch.where(open_yet, stack[row, top.clamp(min=0)], CLOSE)
        is_digit, is_sign = open_yet & (item == 1), open_yet & (item == 2)
        opens, is_operator = open_yet & (item >= 3), open_yet & (item == OPERATOR)
        closes = open_yet & (item == CLOSE)
        operator = operators[:, t]
        token = torch.where(is_sign, minus, digits[:, t])
        token = torch.where(opens, opening, token)
        token = torch.where(closes, closing, token)
        tokens[:, t] = torch.where(is_operator, plus + operator, token)
        # the value so far
        inner = (s + p) % modulus
        level = level - closes.long()
        kept = pairs[row, level]
        factor = torch.where(is_digit, digits[:, t], torch.where(is_sign, -1, 1))
        adds = is_operator & (operator < 2)
        s_after, p_after = torch.where(adds, s + p, s), torch.where(adds, 1 - 2 * operator, p * factor)
        s_after, p_after = (
            torch.where(closes, kept[:, 0], s_after),
            torch.where(closes, inner * kept[:, 1], p_after),
        )
        pairs[row, level] = torch.where(opens[:, None], torch.stack([s, p], 1), kept)
        level = level + opens.long()
        s = torch.where(opens, 0, s_after) % modulus
        p = torch.where(opens, 1, p_after) % modulus
        # what follows, the next token on top
        branches = opens & (item >= 5)
        left = 1 + (splits[:, t].double() * (item - 4)).long()
        top = torch.where(open_yet, top - 1, top)
        for pushed, here in (
            (torch.full_like(row, CLOSE), opens),
            (torch.where(branches, item - 3 - left, item - 2), opens),
            (torch.full_like(row, OPERATOR), branches),
            (left, branches),
            (torch.ones_like(row), is_sign),
        ):
            top = top + here.long()
            place = top.clamp(min=0)
            stack[row, place] = torch.where(here, pushed, stack[row, place])
    return tokens, (s + p) % modulus
