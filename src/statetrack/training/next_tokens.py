"""How a batch of a corpus goes into a model that predicts next tokens, document by document if asked."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.layers import Model
from statetrack.layers.mixer import Packing
from statetrack.spec import RunSpec
from statetrack.tasks import Batch, Corpus
from statetrack.tasks.token_shards import TRAIN


class NextTokens:
    """Batch (B, T) -> tokens, the model's options, and the targets.

    Without `reset`, rows are as they are, and a state passes from a document to the next in a row. With it,
    rows are packed into one, (1, B T), and each sequence starts from an empty state: at the beginning of a
    row, and at every end-of-document token, which predicts the first token of the document after it.
    """

    def __init__(self, spec: RunSpec, model: Model):
        assert isinstance(spec.task, Corpus)
        self.most: np.ndarray | None = None
        if not spec.task.reset:
            return
        if not model.packs:
            raise UserError(
                "Corpus: reset needs mixers that take packed sequences, and a mixer of this model does not. "
                "Choose another mixer, or leave reset off."
            )
        self.end_of_document, self.context = spec.task.shards.end_of_document, spec.task.context
        self.most = most_sequences(spec.task, spec.training.batch)

    def __call__(self, batch: Batch) -> tuple[Tensor, dict[str, Any], Tensor]:
        inputs, targets = batch
        if self.most is None:
            return inputs, {"targets": targets}, targets
        capacity = int(self.most[: len(inputs)].sum())
        bounds = document_bounds(inputs, self.end_of_document, capacity)
        tokens, labels = inputs.reshape(1, -1), targets.reshape(1, -1)
        return tokens, {"targets": labels, "packing": Packing(bounds, self.context)}, labels


def document_bounds(inputs: Tensor, end_of_document: int, capacity: int) -> Tensor:
    """Where sequences start in the rows of inputs (B, T) put one after the other, and their end.

    Shape (capacity + 1,), int32, whatever the inputs hold, and nothing is read on the host, so a CUDA graph
    can record it: what is left over of the capacity makes empty sequences at the end.
    """
    starts = inputs == end_of_document
    starts[:, 0] = True
    size = inputs.numel()
    places = torch.where(starts.flatten(), torch.arange(size, device=inputs.device), size)
    bounds = places.sort().values[:capacity]
    return torch.cat([bounds, bounds.new_full((capacity + 1 - len(bounds),), size)]).int()


def most_sequences(corpus: Corpus, batch: int) -> np.ndarray:
    """How many sequences the rows of a batch may begin, (batch,), falling.

    The sum of the first n is the capacity that n rows need at most. A batch that reaches into the next epoch
    may hold a window twice.
    """
    shards, context = corpus.shards, corpus.context
    windows = (shards.tokens(TRAIN) - 1) // context
    ends = shards.documents(TRAIN)[1:] - 1
    before = np.searchsorted(ends, np.arange(windows + 1, dtype=np.int64) * context)
    most = np.sort(np.diff(before))[::-1][:batch] + 1
    return np.repeat(np.minimum(most, context), batch // windows + 2)[:batch]
