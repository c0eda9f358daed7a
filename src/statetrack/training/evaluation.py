"""Accuracy against length, on sequences that depend on nothing but the spec. For text see `heldout.py`."""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from statetrack.errors import UserError
from statetrack.layers import Model
from statetrack.spec import RunSpec
from statetrack.tasks import IGNORE, StoredTask, answer_positions
from statetrack.training.heldout import heldout
from statetrack.training.precision import autocast
from statetrack.training.ranks import Ranks


@torch.no_grad()
def evaluate(model: Model, spec: RunSpec, device: torch.device, ranks: Ranks | None = None) -> dict:
    """Accuracy at every length of the spec; the keys are those of one line of metrics.jsonl.

        spec, model = load_run(folder)
        evaluate(model, spec, torch.device("cpu"))["accuracy"]          {"40": 1.0, "256": ...}

    every task with labels: `majority_accuracy`, what always giving the most frequent answer of these samples
    would score at each length (or in each bin): an accuracy means something only above it;
    dense tasks: `accuracy`, the label at exactly that position; `sequence_accuracy`, every label up to it;
    last-position tasks: `accuracy` in bins between the lengths, and `scaled_accuracy` over all samples, where
    0 is guessing and 1 is perfect; `majority_scaled_accuracy` is what always giving the most frequent answer
    of these samples would score, which on unbalanced tasks is well above 0;
    stored tasks: `accuracy` over labels and `sequence_accuracy` (every label of a sequence) in bins of test
    lengths, and the two scaled numbers as above, over all labels;
    a corpus: `heldout_loss` and `perplexity`, see `heldout`. Several ranks share this work; of the other
    tasks every rank does all of it.
    """
    # always drawn on the CPU: a GPU would draw other sequences from the same seed
    generator = Generator().manual_seed(spec.evaluation.eval_seed)
    was_training = model.training
    model.eval()
    try:
        if spec.task.labels == "next":
            return heldout(model, spec, device, ranks or Ranks())
        measure = {"dense": _dense, "last": _last, "given": _given}[spec.task.labels]
        return measure(model, spec, generator, device)
    finally:
        model.train(was_training)


def _dense(model: Model, spec: RunSpec, generator: Generator, device: torch.device) -> dict:
    """One pass at the longest length measures all of them. Position 0 is the start token."""
    lengths = list(spec.evaluation.eval_lengths or ())
    samples = spec.evaluation.eval_samples
    right = torch.zeros(2, len(lengths), dtype=torch.float64)
    answers = torch.zeros(len(lengths), spec.task.n_classes, dtype=torch.long)
    for size in _batch_sizes(samples, spec):
        batch = spec.task.sample(size, (lengths[-1], lengths[-1]), generator)
        correct = _predict(model, spec, batch.inputs, device) == batch.targets
        unbroken = correct.cummin(1).values
        right += torch.stack([x[:, lengths].double().sum(0) for x in (correct, unbroken)]).cpu()
        given = batch.targets[:, lengths].T.cpu()
        answers.scatter_add_(1, given, torch.ones_like(given))
    shares = [*right / samples, answers.max(1).values.double() / samples]
    names = ("accuracy", "sequence_accuracy", "majority_accuracy")
    return {
        name: dict(zip(map(str, lengths), share.tolist(), strict=True))
        for name, share in zip(names, shares, strict=True)
    }


def _last(model: Model, spec: RunSpec, generator: Generator, device: torch.device) -> dict:
    """Sequences of every length between the first and the last, sorted so that little is spent on padding."""
    edges = list(spec.evaluation.eval_lengths or ())
    samples = spec.evaluation.eval_samples
    lengths = spec.task.draw_lengths(samples, (edges[0], edges[-1]), generator).sort().values
    correct, answers, start = [], [], 0
    for size in _batch_sizes(samples, spec):
        batch = spec.task.fill(lengths[start : start + size], generator)
        at = answer_positions(batch.targets)
        targets = batch.targets.gather(1, at)[:, 0]
        correct.append(_predict(model, spec, batch.inputs, device, at)[:, 0] == targets)
        answers.append(targets.cpu())
        start += size
    right, given = torch.cat(correct).double().cpu(), torch.cat(answers)
    bins = list(_bins(edges, lengths))
    return {
        "accuracy": {name: right[inside].mean().item() for name, inside in bins},
        "majority_accuracy": {name: _majority(given[inside]) for name, inside in bins},
    } | _scaled(spec, right.mean().item(), _majority(given))


def _given(model: Model, spec: RunSpec, generator: Generator, device: torch.device) -> dict:
    """Stored test sequences, `eval_samples` of them at most, sorted so that little is spent on padding."""
    assert isinstance(spec.task, StoredTask)
    edges, stored = list(spec.evaluation.eval_lengths or ()), spec.task.sequences("test")
    rows = stored.of_lengths(edges[0], edges[-1])
    if not len(rows):
        raise UserError(
            f"evaluation: no test sequence has {edges[0]} to {edges[-1]} tokens, expected lengths from "
            f"{stored.lengths.min()} to {stored.lengths.max()}."
        )
    rows = rows[torch.randperm(len(rows), generator=generator)[: spec.evaluation.eval_samples]]
    lengths, by_length = stored.lengths[rows].sort(stable=True)
    right, answers, start = [], [], 0
    for size in _batch_sizes(len(rows), spec):
        chosen = by_length[start : start + size]
        batch = stored.batch(rows[chosen], int(stored.lengths[rows[chosen]].max()))
        counts = batch.targets != IGNORE
        right.append(((_predict(model, spec, batch.inputs, device) == batch.targets) & counts).sum(1))
        answers += [row[kept] for row, kept in zip(batch.targets, counts, strict=True)]
        start += size
    hits = torch.cat(right).double()
    asked = torch.tensor([len(labels) for labels in answers], dtype=torch.float64)
    bins = list(_bins(edges, lengths))
    majority = {
        name: _majority(torch.cat(list(itertools.compress(answers, inside)))) for name, inside in bins
    }
    return {
        "accuracy": {name: (hits[inside].sum() / asked[inside].sum()).item() for name, inside in bins},
        "sequence_accuracy": {
            name: (hits[inside] == asked[inside]).double().mean().item() for name, inside in bins
        },
        "majority_accuracy": majority,
    } | _scaled(spec, (hits.sum() / asked.sum()).item(), _majority(torch.cat(answers)))


def _bins(edges: list[int], lengths: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The bins between the edges that have sequences, and which these are; the last edge counts."""
    where = torch.bucketize(lengths.cpu(), torch.tensor(edges[1:-1], dtype=lengths.dtype), right=True)
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        inside = where == i
        if inside.any():
            yield f"{low}-{high if i == len(edges) - 2 else high - 1}", inside


def _majority(answers: Tensor) -> float:
    """The share of the most frequent of some answers (n,)."""
    return answers.bincount().max().item() / len(answers)


def _scaled(spec: RunSpec, accuracy: float, majority: float) -> dict:
    """The accuracy and that of always giving the most frequent answer, scaled: 0 is chance, 1 is perfect."""
    chance = spec.task.chance
    return {
        "scaled_accuracy": (accuracy - chance) / (1 - chance),
        "majority_scaled_accuracy": (majority - chance) / (1 - chance),
    }


def _predict(
    model: Model, spec: RunSpec, inputs: Tensor, device: torch.device, at: Tensor | None = None
) -> Tensor:
    with autocast(spec, device):
        logits, _ = model(inputs.to(device), at=None if at is None else at.to(device))
    return logits.argmax(-1).cpu()


def _batch_sizes(samples: int, spec: RunSpec) -> list[int]:
    batches = math.ceil(samples / spec.evaluation.eval_batch)
    return [min(spec.evaluation.eval_batch, samples - i * spec.evaluation.eval_batch) for i in range(batches)]
