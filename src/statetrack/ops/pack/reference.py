"""Packing in plain PyTorch."""

import torch
from torch import Tensor


def pack_reference(
    inputs: Tensor, targets: Tensor, ignore: int, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens (rows,); the bounds of sequences, int32; where each answer is (B,); the answers (B,).

    A sequence ends with its answer, the one position whose target counts. The first B bounds after 0 are the
    ends of the sequences. Rows left over hold token 0 and make further sequences of at most W steps, so that
    every row belongs to one: ceil(rows / W) more bounds, of which many may be equal. A sequence that does not
    fit is cut, and its answer is `ignore`.
    """
    (B, W), device = inputs.shape, inputs.device
    position = (targets != ignore).byte().argmax(1, keepdim=True)
    answers = targets.gather(1, position)[:, 0]
    lengths = position[:, 0] + 1
    ends = lengths.cumsum(0)
    left_over = W * torch.arange(1, -(-rows // W) + 1, device=device)
    bounds = torch.cat([torch.zeros_like(ends[:1]), ends, ends[-1:] + left_over]).clamp(max=rows)
    row = torch.arange(rows, device=device)
    sequence = torch.searchsorted(ends, row, right=True)
    inside, sequence = sequence < B, sequence.clamp(max=B - 1)
    place = (row - (ends - lengths)[sequence]).clamp(max=W - 1)
    return (
        torch.where(inside, inputs[sequence, place], 0),
        bounds.int(),
        (ends - 1).clamp(max=rows - 1),
        torch.where(ends <= rows, answers, ignore),
    )
