"""Accuracy against length, on sequences that depend on nothing but the spec."""

import itertools
import math

import torch
from torch import Generator, Tensor

from statetrack.layers import Model
from statetrack.spec import RunSpec
from statetrack.tasks import answer_positions


@torch.no_grad()
def evaluate(model: Model, spec: RunSpec, device: torch.device) -> dict:
    """Accuracy at every length of the spec; the keys are those of one line of metrics.jsonl.

    dense tasks: `accuracy`, the label at exactly that position; `sequence_accuracy`, every label up to it;
    last-position tasks: `accuracy` in bins between the lengths, and `scaled_accuracy` over all samples, where
    0 is guessing and 1 is perfect; `majority_scaled_accuracy` is what always giving the most frequent answer
    of these samples would score, which on unbalanced tasks is well above 0.
    """
    # always drawn on the CPU: a GPU would draw other sequences from the same seed
    generator = Generator().manual_seed(spec.evaluation.eval_seed)
    was_training = model.training
    model.eval()
    try:
        measure = _dense if spec.task.labels == "dense" else _last
        return measure(model, spec, generator, device)
    finally:
        model.train(was_training)


def _dense(model: Model, spec: RunSpec, generator: Generator, device: torch.device) -> dict:
    """One pass at the longest length measures all of them. Position 0 is the start token."""
    lengths = list(spec.evaluation.eval_lengths or ())
    samples = spec.evaluation.eval_samples
    right = torch.zeros(2, len(lengths), dtype=torch.float64)
    for size in _batch_sizes(samples, spec):
        batch = spec.task.sample(size, (lengths[-1], lengths[-1]), generator)
        correct = _predict(model, spec, batch.inputs, device) == batch.targets
        unbroken = correct.cummin(1).values
        right += torch.stack([x[:, lengths].double().sum(0) for x in (correct, unbroken)]).cpu()
    accuracy, sequence = (right / samples).tolist()
    return {
        "accuracy": dict(zip(map(str, lengths), accuracy, strict=True)),
        "sequence_accuracy": dict(zip(map(str, lengths), sequence, strict=True)),
    }


def _last(model: Model, spec: RunSpec, generator: Generator, device: torch.device) -> dict:
    """Sequences of every length between the first and the last, sorted so that little is spent on padding."""
    edges = list(spec.evaluation.eval_lengths or ())
    samples = spec.evaluation.eval_samples
    lengths = spec.task.draw_lengths(samples, (edges[0], edges[-1]), generator).sort().values
    correct, start = [], 0
    answers = torch.zeros(spec.task.n_classes, dtype=torch.long, device=generator.device)
    for size in _batch_sizes(samples, spec):
        batch = spec.task.fill(lengths[start : start + size], generator)
        at = answer_positions(batch.targets)
        targets = batch.targets.gather(1, at)[:, 0]
        correct.append(_predict(model, spec, batch.inputs, device, at)[:, 0] == targets)
        answers += torch.bincount(targets, minlength=spec.task.n_classes)
        start += size
    right = torch.cat(correct).double().cpu()
    # the last edge belongs to the last bin
    where = torch.bucketize(lengths.cpu(), torch.tensor(edges[1:-1], dtype=lengths.dtype), right=True)
    bins = {}
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        inside = right[where == i]
        if len(inside):
            bins[f"{low}-{high if i == len(edges) - 2 else high - 1}"] = inside.mean().item()
    chance, majority = spec.task.chance, answers.max().item() / answers.sum().item()
    return {
        "accuracy": bins,
        "scaled_accuracy": (right.mean().item() - chance) / (1 - chance),
        "majority_scaled_accuracy": (majority - chance) / (1 - chance),
    }


def _predict(
    model: Model, spec: RunSpec, inputs: Tensor, device: torch.device, at: Tensor | None = None
) -> Tensor:
    with autocast(spec, device):
        logits, _ = model(inputs.to(device), at=None if at is None else at.to(device))
    return logits.argmax(-1).cpu()


def autocast(spec: RunSpec, device: torch.device) -> torch.autocast:
    """The spec's precision, for training and evaluation alike."""
    return torch.autocast(device.type, torch.bfloat16, enabled=spec.training.precision == "bfloat16")


def _batch_sizes(samples: int, spec: RunSpec) -> list[int]:
    batches = math.ceil(samples / spec.evaluation.eval_batch)
    return [min(spec.evaluation.eval_batch, samples - i * spec.evaluation.eval_batch) for i in range(batches)]
