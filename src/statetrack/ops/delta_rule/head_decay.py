"""What one decay per head adds to the chunked form: the decays between steps, and the gradient of g."""

import torch
from torch import Tensor


def readable(A: Tensor, householders: int) -> Tensor:
    """Mask (C, C n): token i sees the steps of tokens 0..i, since it is read after its own last step."""
    tokens = torch.arange(A.shape[-2], device=A.device)
    return (tokens[:, None] >= tokens.repeat_interleave(householders)[None, :]).to(A.dtype)


class GateGradient:
    """dg (chunks, heads, C): every term with a decay exp(G_i - G_j) adds to dg_t for j < t <= i.

        dg_t = sum_{i >= t > j} (dP o P + dA o A)_ij + sum_{i >= t} in_i + sum_{j < t} out_j + exp(G_C) <S, D>

    where in and out are the terms with exp(G) and exp(G_C - G). Differences of sums over all pairs would be
    shorter, but under a strong decay they would cancel to less than their rounding errors.
    """

    def __init__(self, moved_k: Tensor, moved_q: Tensor, householders: int):
        self.householders = householders
        pairs = moved_q + moved_k if householders == 1 else self._of_tokens(moved_k.mT).mT + moved_q
        pairs = self._of_tokens(pairs).tril(-1)
        # ones in row t from column t on
        self.from_here = torch.ones(pairs.shape[-2:], dtype=pairs.dtype, device=pairs.device).triu()
        self.dg = (self.from_here @ pairs).tril(-1).sum(-1)

    def _of_tokens(self, x: Tensor) -> Tensor:
        """(..., C n) -> (..., C): the sum over a token's steps."""
        n = self.householders
        return x if n == 1 else x.unflatten(-1, (-1, n)).sum(-1)

    def add_entering(self, by_q: Tensor, by_k: Tensor) -> None:
        """The terms with exp(G): of q per token, and of -k per step."""
        self.dg += (by_q - self._of_tokens(by_k)) @ self.from_here.mT

    def add_leaving(self, by_k: Tensor) -> None:
        """The terms with exp(G_C - G), of k per step."""
        self.dg += self._of_tokens(by_k) @ self.from_here.triu(1)


def token_decay(G: Tensor, householders: int) -> Tensor:
    """exp(G_i - G_j) from step j to the read-out of token i, zero where j is later; (C, C n)."""
    difference = G[..., householders - 1 :: householders, :] - G.mT
    return difference.masked_fill(readable(difference, householders) == 0, -torch.inf).exp()
