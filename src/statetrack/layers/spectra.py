"""Eigenvalues of the transitions of the delta rule: Householder factors times gates and rotations."""

import torch
from torch import Tensor

from statetrack.layers.precision import at_least_float32
from statetrack.ops.delta_rule.reference import l2_normalise
from statetrack.ops.gated_linear_attention.rotation import rotate


def delta_spectrum(
    k: Tensor, beta: Tensor, gate: Tensor | None, angle: Tensor | None = None, householders: int = 1
) -> Tensor:
    """The eigenvalues (B, T, H, K) of (I - beta_n k_n k_n^T) ... (I - beta_1 k_1 k_1^T) diag(gate) R(angle).

    Shapes: k (B, T n, H, K), normalised here; beta (B, T n, H); gate (B, T, H) or (B, T, H, K); angle
    (B, T, H, K/2). One factor I - beta k k^T has 1 - beta |k|^2 once and 1 otherwise, times a gate per head.
    With gates per channel of one sign it is similar to a symmetric matrix, so real. Anything else is complex.
    """
    k = l2_normalise(at_least_float32(k))
    per_channel = gate is not None and gate.ndim == 4
    if householders == 1 and angle is None and not per_channel:
        spectrum = torch.ones_like(k)
        spectrum[..., 0] = 1 - beta * k.square().sum(-1)
        return spectrum if gate is None else spectrum * gate[..., None]
    k, beta = k.unflatten(1, (-1, householders)), beta.unflatten(1, (-1, householders))
    A = torch.eye(k.shape[-1], device=k.device, dtype=k.dtype)
    if householders == 1 and angle is None and gate is not None and bool((gate >= 0).all()):
        root = gate.to(k.dtype).sqrt()
        key = root * k[:, :, 0]
        A = torch.diag_embed(root.square()) - beta[:, :, 0, :, None, None] * key[..., :, None] * key[..., None, :]
        return torch.linalg.eigvalsh(A)
    if angle is not None:
        A = rotate(A, angle.cos()[..., None].to(k.dtype), angle.sin()[..., None].to(k.dtype), dim=-2)
    if per_channel:
        A = gate[..., :, None] * A
    for i in range(householders):
        A = A - beta[:, :, i, :, None, None] * k[:, :, i, :, :, None] * (k[:, :, i, :, None, :] @ A)
    spectrum = torch.linalg.eigvals(A)
    return spectrum if gate is None or per_channel else spectrum * gate[..., None]
