"""How fast a language model trains: tokens per second, model FLOP utilisation (MFU), memory, time left.

    MFU = tokens per second x FLOP per token / (processes x peak)
    FLOP per token = 6 P + 6 A T d        P parameters that multiply a token: all but an untied embedding
                                          A attention layers, T context, d width

Six, because a multiply-add is two operations and the backward pass takes twice those of the forward pass. The
recurrences and the repetitions of activation checkpointing are not counted, so that MFU is a lower bound of
what the device does. The peak is the vendor's number for dense bfloat16 products with float32 sums. These
numbers depend on the machine and the hour, so they are in throughput.jsonl, not in metrics.jsonl.
"""

import contextlib
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from statetrack.layers import AttentionConfig, Model, ModelConfig
from statetrack.spec import RunSpec
from statetrack.training.ranks import Ranks

# Peak of dense bfloat16 in 1e12 FLOP/s, by a part of the device's name; the first that fits counts.
PEAKS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 PCIe", 756.4),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.1),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 6000 Ada", 364.2),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
)


def flops_per_token(config: ModelConfig, vocabulary: int, context: int) -> float:
    """The FLOP of forward and backward pass per token; the formula is at the top."""
    with torch.device("meta"):
        model = Model(config, vocabulary, vocabulary)
    parameters = sum(p.numel() for p in model.parameters())
    if not config.tied:
        parameters -= model.embedding.weight.numel()
    attention = sum(isinstance(config.mixer_of(i), AttentionConfig) for i in range(config.layers))
    return 6.0 * parameters + 6.0 * attention * context * config.d_model


def peak_flops(name: str, precision: str) -> float | None:
    """The peak of a device in FLOP/s by its name; None where it is not known, or for float32."""
    if precision != "bfloat16":
        return None
    return next((peak * 1e12 for part, peak in PEAKS if part in name), None)


class Meter:
    """The clock of a run on a corpus, on rank 0: `start`, then `read` at every row of metrics.

    Evaluations and checkpoints are inside `paused` and do not count.
    """

    def __init__(self, spec: RunSpec, device: torch.device, ranks: Ranks):
        context = (spec.training.train_lengths or (1, 1))[1]
        self.tokens = spec.training.batch * context
        self.steps, self.device = spec.training.steps, device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        peak = peak_flops(name, spec.training.precision)
        # tokens per second at which the devices would do nothing but these products at their peak
        self.bound = None
        if peak is not None:
            self.bound = ranks.size * peak / flops_per_token(spec.model, spec.task.vocab_size, context)
        self.began = self.since = self.waited = 0.0
        self.first = self.last = 0

    def start(self, step: int) -> None:
        self.began = self.since = time.monotonic()
        self.first = self.last = step

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before = time.monotonic()
        yield
        self.waited += time.monotonic() - before

    def read(self, step: int) -> dict[str, Any]:
        """Of the steps since the last reading; the time left is that at the pace since `start`."""
        now = time.monotonic()
        seconds, steps = max(now - self.since - self.waited, 1e-9), step - self.last
        rate = steps * self.tokens / seconds
        pace = (now - self.began) / (step - self.first)
        row = {"tokens": step * self.tokens, "tokens_per_second": rate}
        row |= {} if self.bound is None else {"mfu": rate / self.bound}
        row |= {"memory_bytes": self._memory(), "seconds_left": pace * (self.steps - step)}
        self.since, self.waited, self.last = now, 0.0, step
        return row

    def _memory(self) -> int:
        """The most so far: of the GPU's allocator, or of the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def append_throughput(path: Path, step: int, row: dict[str, Any]) -> None:
    """Add a line to throughput.jsonl. Steps that a resumed run repeats appear again."""
    with open(path, "a") as file:
        file.write(json.dumps({"step": step} | row) + "\n")
