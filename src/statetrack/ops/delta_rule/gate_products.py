"""Products of gates within chunks, by doubling: without a logarithm, and without a division."""

import torch
from torch import Tensor

SMALL = 2  # blocks of this many steps are too small for a batched matrix product


def gate_products(left: Tensor, k: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The products (left_t o a_{s+1} ... a_t) . k_s for s <= t, and the products of gates at the ends.

    Shapes: left (n, H, R, C, K), R kinds of rows; k and a (n, H, C, K), C a power of two. Returns the lower
    triangles (n, H, R, C, C), P_t = a_1 ... a_t and X_t = a_{t+1} ... a_C. Of two neighbouring blocks of m
    steps, t in the second and s in the first,

        A_ts = (P_t o left_t) . (X_s o k_s)

    with P from the start of the second block and X to the end of the first: one matrix product for all pairs
    of blocks. Then m doubles. Every number is a product of gates, so none is larger than the largest gate.
    """
    C, m = a.shape[-2], 1
    # (n, H, blocks, m, K) and for A (n, H, R, blocks, m, m)
    P, X = a[..., None, :], torch.ones_like(a)[..., None, :]
    A = (left * k[:, :, None]).sum(-1)[..., None, None]
    while m < C:
        (A0, A1), (P0, P1), (X0, X1) = (x.unflatten(-3, (-1, 2)).unbind(-3) for x in (A, P, X))
        second = left.unflatten(-2, (-1, 2, m)).select(-3, 1)
        first = k.unflatten(-2, (-1, 2, m)).select(-3, 0)
        lower = _products(P1[:, :, None] * second, (X0 * first)[:, :, None])
        A = torch.cat([torch.cat([A0, torch.zeros_like(A0)], -1), torch.cat([lower, A1], -1)], -2)
        P, X = torch.cat([P0, P0[..., -1:, :] * P1], -2), torch.cat([X0 * P1[..., -1:, :], X1], -2)
        m *= 2
    return A.squeeze(-3), P.squeeze(-3), X.squeeze(-3)


def _products(x: Tensor, y: Tensor) -> Tensor:
    """x y^T of blocks (..., m, K)."""
    if x.shape[-1] == 1:
        return x * y.mT
    if x.shape[-2] <= SMALL:
        return (x[..., :, None, :] * y[..., None, :, :]).sum(-1)
    return x @ y.mT
