"""Parity as the paper trains it (Sec. 5.1): one answer at the end of each sequence."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from statetrack.tasks.task import IGNORE, Batch, Task

PAD, BIT0 = 0, 1


@dataclass(frozen=True)
class Parity(Task):
    """Is the number of ones odd? Asked once, at the last bit. Tokens: PAD 0, bit zero 1, bit one 2.

        bits        1  0  1  1  0
        inputs      2  1  2  2  1
        targets     .  .  .  .  2          2 is the token of bit one: three ones, odd

    A length counts the answer too, so length 6 holds five bits. Theorem 1: no finite-precision linear RNN
    whose eigenvalues are all >= 0 solves it at every length. For labels at every position use the word
    problem of S_2, the task "parity-dense".
    """

    labels = "last"
    train_lengths = (3, 40)
    eval_lengths = (40, 64, 96, 128, 192, 256)
    shortest = 2  # one bit and its answer

    @property
    def vocab_size(self) -> int:
        return 3

    @property
    def n_classes(self) -> int:
        return 3

    @property
    def chance(self) -> float:
        return 1 / 2

    def fill(self, lengths: Tensor, generator: Generator, width: int | None = None) -> Batch:
        longest = (int(lengths.max()) if width is None else width) - 1
        shape = (lengths.numel(), longest)
        bits = torch.randint(2, shape, generator=generator, device=generator.device)
        position = torch.arange(longest, device=generator.device)
        last = lengths[:, None] - 2
        odd = bits.cumsum(1) % 2
        inputs = torch.where(position <= last, bits + BIT0, PAD)
        return Batch(inputs, torch.where(position == last, odd + BIT0, IGNORE))
