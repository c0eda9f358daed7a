"""Group word problems (Sec. 5.2): track the product of all elements read so far."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Generator, Tensor

from statetrack.errors import UserError, unknown_name
from statetrack.tasks.groups import Group, group
from statetrack.tasks.task import Batch, Task, labelled_up_to

MOVED = {"swaps": 2, "up-to-3": 3}
INPUTS = ("all", *MOVED, "generators")


@dataclass(frozen=True)
class WordProblem(Task):
    """After each element, which element is the product so far (the first one applied first)?

        S3, ids of (0 1 2), (0 2 1), (1 0 2), (1 2 0), (2 0 1), (2 1 0) = 0 .. 5, BOS = 6
        inputs   6  1  2  2  4
        targets  6  1  3  1  5

    `inputs` restricts the elements drawn: "swaps" move at most two points, "up-to-3" at most three,
    "generators" are those the group was defined by. With `tokens_per_element` k > 1 every element is followed
    by k - 1 filler tokens, and its label comes k - 1 positions later, so the model has k tokens to apply it.
    """

    group: str = "S5"  # S5, A5, Z60 (any number), or generators such as "1 0 2; 1 2 0"
    inputs: Literal["all", "swaps", "up-to-3", "generators"] = "all"  # which elements are drawn
    tokens_per_element: int = 1  # 1, or more for filler tokens after each element

    labels = "dense"
    train_lengths = (32, 32)
    eval_lengths = (32, 64, 128, 256)

    def __post_init__(self):
        if self.tokens_per_element < 1:
            raise UserError(
                f"WordProblem: tokens_per_element is {self.tokens_per_element}, expected at least 1."
            )
        _allowed(self._group, self.inputs)
        object.__setattr__(self, "group", self._group.name)  # "s_5" and "S5" are one task

    @property
    def _group(self) -> Group:
        return group(self.group)

    @property
    def filler(self) -> int:
        """The token between elements; unused when every token is an element."""
        return self._group.order

    @property
    def bos(self) -> int:
        """The token every sequence begins with; its label is itself."""
        return self._group.order + (self.tokens_per_element > 1)

    @property
    def vocab_size(self) -> int:
        return self.bos + 1

    @property
    def n_classes(self) -> int:
        return self.bos + 1

    @property
    def chance(self) -> float:
        return 1 / self._group.order

    @property
    def elements(self) -> np.ndarray:
        """The elements that are drawn, by number."""
        return _allowed(self._group, self.inputs)

    def fill(self, lengths: Tensor, generator: Generator, width: int | None = None) -> Batch:
        """Sequences (B, 1 + T): BOS, then T tokens. All lengths are equal, as every position is labelled."""
        B, k = lengths.numel(), self.tokens_per_element
        T = int(lengths[0]) if width is None else width
        allowed = _allowed_on(self.group, self.inputs, generator.device)
        drawn = torch.randint(len(allowed), (B, -(-T // k)), generator=generator, device=generator.device)
        return labelled_up_to(lengths, self.label(allowed[drawn], T))

    def go_on(self, start: Tensor, batch: Batch, generator: Generator) -> Batch:
        """The batch with one more element in the place of BOS, as what follows a product `start` (B,).

        For one token per element: the labels are the products of everything from `start` on.
        """
        allowed = _allowed_on(self.group, self.inputs, generator.device)
        first = torch.randint(len(allowed), (len(start), 1), generator=generator, device=generator.device)
        elements = torch.cat([allowed[first], batch.inputs[:, 1:]], 1)
        products = self._group.prefix_products(torch.cat([start[:, None], elements], 1))
        return Batch(elements, products[:, 1:])

    def label(self, elements: Tensor, T: int) -> Batch:
        """The batch of T tokens whose elements are given, (B, ceil(T / k))."""
        k, B = self.tokens_per_element, elements.shape[0]
        products = self._group.prefix_products(elements)
        inputs = torch.full((B, elements.shape[1], k), self.filler, device=elements.device)
        inputs[:, :, 0] = elements
        inputs = inputs.flatten(1)[:, :T]
        # position i shows the product of the elements at positions <= i - (k - 1)
        held = products[:, :, None].expand(-1, -1, k).flatten(1)
        targets = torch.cat([torch.zeros_like(held[:, : k - 1]), held], dim=1)[:, :T]
        bos = torch.full((B, 1), self.bos, device=elements.device)
        return Batch(torch.cat([bos, inputs], 1), torch.cat([bos, targets], 1))


@lru_cache(maxsize=16)  # used in every training step
def _allowed_on(of: str, inputs: str, device: torch.device) -> Tensor:
    return torch.from_numpy(_allowed(group(of), inputs)).to(device)


def _allowed(of: Group, inputs: str) -> np.ndarray:
    """The elements that may be drawn."""
    if inputs == "all":
        return np.arange(of.order)
    if inputs == "generators":
        if of.generators is None:
            raise UserError(
                f'WordProblem: inputs is "generators", but {of.name} was not given by generators.'
            )
        return np.array(of.generators)
    if inputs not in MOVED:
        raise unknown_name("WordProblem: inputs", inputs, INPUTS)
    if of.moved is None:
        raise UserError(f"WordProblem: inputs is {inputs!r}, but the elements of {of.name} move no points.")
    return np.flatnonzero(of.moved <= MOVED[inputs])
