"""Loss and perplexity on the held-out splits of a corpus, by position, at constant memory.

A window goes through the model in pieces between the edges, each from the state that the one before left, so
its length is not bounded by the context of training.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from statetrack.layers import Model
from statetrack.spec import RunSpec
from statetrack.tasks import IGNORE, Corpus
from statetrack.tasks.corpus import next_tokens
from statetrack.tasks.token_shards import TokenShards
from statetrack.training.precision import autocast
from statetrack.training.ranks import Ranks

TOKENS_AT_ONCE = 2**16  # per rank, at most, whatever `eval_batch` says


class Windows(NamedTuple):
    """Held-out sequences: `lengths` targets each, after the tokens from `starts` on."""

    starts: np.ndarray  # (n,); -1 is an end-of-document token before the stream
    lengths: np.ndarray  # (n,)


def heldout(model: Model, spec: RunSpec, device: torch.device, ranks: Ranks) -> dict:
    """The keys of one line of metrics.jsonl, over all held-out tokens and `by_split`:

        heldout_loss     mean cross-entropy in nats
        frequency_loss   that of the targets' frequencies alone, see `frequency_loss`
        perplexity       exp of it at the positions after one edge of `eval_lengths` up to the next, by edge

    At most `eval_samples` windows of a split, the same for every training seed. With `reset` a window is a
    document, from its beginning; else any piece of the stream.
    """
    assert isinstance(spec.task, Corpus)
    shards = spec.task.shards
    sums = {split: _measure(model, spec, split, device, ranks) for split in shards.heldout}
    edges = [str(edge) for edge in spec.evaluation.eval_lengths or ()]
    total = torch.stack(list(sums.values())).sum(0)
    row = {"heldout_loss": _mean(total), "frequency_loss": frequency_loss(spec)}
    row |= {"perplexity": _perplexity(total, edges)}
    by_split = {
        name: {"loss": _mean(one), "perplexity": _perplexity(one, edges)} for name, one in sums.items()
    }
    return row | {"by_split": by_split}


def frequency_loss(spec: RunSpec) -> float:
    """The loss, in nats, of giving every held-out target of `heldout` its share among them.

    It is the entropy of the frequencies of these targets: no guess that does not look at the text loses less.
    """
    assert isinstance(spec.task, Corpus)
    shards, counts = spec.task.shards, np.zeros(spec.task.shards.vocab_size, np.int64)
    for split in shards.heldout:
        windows = _windows(spec, split)
        for start, length in zip(*windows, strict=True):
            tokens = shards.read(split, int(start) + 1, int(length))
            counts += np.bincount(tokens, minlength=len(counts))
    return entropy(counts)


def entropy(counts: np.ndarray) -> float:
    """Of the frequencies that the counts have, in nats; 0 of no counts."""
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(shares * np.log(shares)).sum())


def _windows(spec: RunSpec, split: str) -> Windows:
    """The windows of a split, the same for every training seed."""
    assert isinstance(spec.task, Corpus)
    # of its own: another split does not change the windows of this one
    generator = Generator().manual_seed(spec.evaluation.eval_seed)
    choose = document_windows if spec.task.reset else stream_windows
    longest = (spec.evaluation.eval_lengths or (0,))[-1]
    return choose(spec.task.shards, split, longest, spec.evaluation.eval_samples, generator)


def _measure(model: Model, spec: RunSpec, split: str, device: torch.device, ranks: Ranks) -> Tensor:
    """Sum of losses and number of targets between the edges, (2, edges), float64 on the CPU."""
    assert isinstance(spec.task, Corpus)
    edges, shards = list(spec.evaluation.eval_lengths or ()), spec.task.shards
    windows = _windows(spec, split)
    rows = max(1, min(spec.evaluation.eval_batch, TOKENS_AT_ONCE // edges[-1])) * ranks.size
    total = torch.zeros(2, len(edges), dtype=torch.float64, device=device)
    for first in range(0, len(windows.starts), rows):
        batch = Windows(*(x[first : first + rows] for x in windows))
        # sharded weights are gathered by all ranks together, so all make the same calls
        longest = int(batch.lengths.max())
        mine = Windows(*(x[ranks.rank :: ranks.size] for x in batch))
        tokens = _read(shards, split, mine, longest).to(device)
        total += _sums(model, spec, tokens, edges)
    return ranks.sum(total).cpu()


def _sums(model: Model, spec: RunSpec, tokens: Tensor, edges: list[int]) -> Tensor:
    """Loss and number of targets between the edges, (2, edges), of rows of tokens, IGNORE past their end."""
    inputs, targets = next_tokens(tokens)
    inputs, states = inputs.clamp(min=0), None
    total = torch.zeros(2, len(edges), dtype=torch.float64, device=tokens.device)
    for i, (low, high) in enumerate(itertools.pairwise((0, *edges))):
        if low >= inputs.shape[1]:
            break
        labels = targets[:, low:high].contiguous()
        with autocast(spec, tokens.device):
            loss, states = model(inputs[:, low:high].contiguous(), states, targets=labels)
        total[0, i], total[1, i] = loss.double(), (labels != IGNORE).sum()
    return total


def stream_windows(
    shards: TokenShards, split: str, length: int, samples: int, generator: Generator
) -> Windows:
    """`samples` of the split's windows of `length` targets; of a split shorter than one, all there is."""
    tokens = shards.tokens(split)
    count = (tokens - 1) // length
    if count == 0:
        return Windows(np.zeros(1, np.int64), np.array([tokens - 1]))
    chosen = np.sort(torch.randperm(count, generator=generator)[:samples].numpy())
    return Windows(chosen * length, np.full(len(chosen), length))


def document_windows(
    shards: TokenShards, split: str, length: int, samples: int, generator: Generator
) -> Windows:
    """The first `length` targets of `samples` documents, after an end-of-document token; longest first."""
    bounds = shards.documents(split)
    chosen = np.sort(torch.randperm(len(bounds) - 1, generator=generator)[:samples].numpy())
    lengths = np.minimum(np.diff(bounds)[chosen], length)
    order = np.argsort(-lengths, kind="stable")
    return Windows(bounds[chosen][order] - 1, lengths[order])


def _read(shards: TokenShards, split: str, windows: Windows, longest: int) -> Tensor:
    """The windows' tokens, (rows, longest + 1), IGNORE past their end; one row of IGNORE for no windows."""
    rows = np.full((max(1, len(windows.starts)), longest + 1), IGNORE, np.int64)
    for row, start, length in zip(rows, *windows, strict=False):
        skipped = int(start < 0)
        row[:skipped] = shards.end_of_document
        row[skipped : length + 1] = shards.read(split, int(start) + skipped, int(length) + 1 - skipped)
    return torch.from_numpy(rows)


def _mean(sums: Tensor) -> float:
    loss, targets = sums.sum(1).tolist()
    return loss / max(targets, 1)


def _perplexity(sums: Tensor, edges: list[str]) -> dict[str, float]:
    """By edge, where there are targets. The bound keeps a diverged model's row a number."""
    return {
        edge: math.exp(min(loss / targets, 700.0))
        for edge, loss, targets in zip(edges, *sums.tolist(), strict=True)
        if targets
    }
