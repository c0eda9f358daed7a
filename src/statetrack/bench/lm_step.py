"""Whole training steps of language models: ours as one CUDA graph beside other libraries' models.

A step is data, forward, backward, clipping and AdamW in bfloat16 with float32 master weights, on random
tokens with the frequencies of text (Zipf), from shards on disk as in any run. MFU = 6 P tokens/s / peak, P
the parameters that multiply a token (all but an untied embedding), peak the vendor's 989.4 TFLOP/s for dense
bfloat16 on an H100 or H200; the recurrence and what is computed twice are not counted.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from statetrack.bench.cases import Work
from statetrack.bench.gpu_steps import taking
from statetrack.layers import DeltaNetConfig, model_config
from statetrack.lm.shards import write_index, write_shard
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import Corpus
from statetrack.training.graph_step import GraphStep
from statetrack.training.source import source_of
from statetrack.training.state import new_state
from statetrack.training.throughput import flops_per_token, peak_flops

WARM_UP = 4  # steps: two eager ones, the capture, a replay


@dataclass(frozen=True)
class LmStep:
    """A training step of the preset `model` on `batch` sequences of `context` tokens."""

    model: str = "deltanet-340m"
    batch: int = 16
    context: int = 2048
    vocabulary: int = 32_000

    @property
    def name(self) -> str:
        return f"{self.model} training step, B{self.batch} T{self.context}"

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    def spec(self, data: str | Path, **changes: Any) -> RunSpec:
        """`data` is a folder that `random_shards` wrote; `changes` are of the model."""
        return RunSpec(
            Corpus(str(data), context=self.context, vocabulary=self.vocabulary),
            model_config(self.model, **changes),
            TrainingConfig(steps=1000, batch=self.batch, lr=3e-4, precision="bfloat16"),
            EvaluationConfig(),
        ).resolved()

    def ours(self, data: str | Path, **changes: Any) -> GraphStep:
        spec, device = self.spec(data, **changes), torch.device("cuda")
        return GraphStep(spec, new_state(spec, device), source_of(spec, device), print)

    def row(self, seconds: float, peak_bytes: int) -> dict[str, Any]:
        """Speed and memory of a step that took `seconds`."""
        rate = self.tokens / seconds
        config = model_config(self.model)
        peak = peak_flops(torch.cuda.get_device_name(), "bfloat16")
        row = {"case": self.name, "ms": 1e3 * seconds, "tokens_per_s": rate, "peak_gb": peak_bytes / 1e9}
        if peak is not None:
            row["mfu"] = rate * flops_per_token(config, self.vocabulary, self.context) / peak
        return row


LM_STEPS = [LmStep(), LmStep("mamba-370m")]


def random_shards(folder: Path, vocabulary: int, tokens: int = 4_000_000) -> None:
    """Token shards of random tokens: token i has a frequency in proportion to 1 / (i + 10)."""
    generator = np.random.default_rng(0)
    weights = 1.0 / (np.arange(vocabulary) + 10.0)
    bounds = np.cumsum(weights / weights.sum())
    splits = {}
    for split, count in (("train", tokens), ("heldout", 100_000)):
        drawn = np.searchsorted(bounds, generator.random(count)).clip(max=vocabulary - 1)
        splits[split] = [write_shard(folder, split, 0, [drawn], "uint16")]
    write_index(folder, splits, vocabulary, vocabulary - 1)


def measure(work: Work, steps: int, warm_up: int = WARM_UP) -> tuple[float, int]:
    """Seconds per step after the first ones, and the most memory that was allocated at a time."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(warm_up):
        work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps, torch.cuda.max_memory_allocated()


def measure_ours(case: LmStep, data: Path, steps: int = 20, **changes: Any) -> tuple[dict[str, Any], Work]:
    """The row of our step, and the step itself for a profile."""
    step = case.ours(data, **changes)
    work = taking(step)
    seconds, peak = measure(work, steps)
    row = case.row(seconds, peak) | {"graph": bool(step.graphs)}
    return row, work


def fla_deltanet(model: str, vocabulary: int, **options: Any) -> Any:
    """flash-linear-attention's DeltaNet with the sizes of our preset `model`, on the GPU."""
    from statetrack.bench.gpu_floor import peer_module

    models, config = peer_module("fla.models", "flash-linear-attention"), model_config(model)
    assert isinstance(config.mixer, DeltaNetConfig)
    peer = models.DeltaNetConfig(
        hidden_size=config.d_model,
        num_heads=config.mixer.heads,
        num_hidden_layers=config.layers,
        intermediate_size=round(config.mlp_ratio * config.d_model),
        allow_neg_eigval=True,
        vocab_size=vocabulary,
        **options,
    )
    return models.DeltaNetForCausalLM(peer).cuda()


def fla_work(case: LmStep, data: Path, half_weights: bool, fuse_linear: bool) -> Work:
    """A step of flash-linear-attention's model: autocast, or bfloat16 weights; fused AdamW, the same clip.

    Its model shifts labels itself. `fuse_linear` takes its cross-entropy that does not hold all logits.
    """
    spec = case.spec(data)
    loss = {"fuse_cross_entropy": not fuse_linear, "fuse_linear_cross_entropy": fuse_linear}
    model = fla_deltanet(case.model, case.vocabulary, use_cache=False, **loss)
    if half_weights:
        model = model.bfloat16()
    training = spec.training
    optimizer = torch.optim.AdamW(
        model.parameters(), training.lr, weight_decay=training.weight_decay, fused=True
    )
    source, generator, count = source_of(spec, torch.device("cuda")), torch.Generator("cuda"), [0]

    def work() -> None:
        from statetrack.training.protocols import WHOLE

        batch = source.batch(count[0], WHOLE, generator)
        count[0] += 1
        with torch.autocast("cuda", torch.bfloat16, enabled=not half_weights):
            loss = model(input_ids=batch.inputs, labels=batch.inputs).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()

    return work


# Kernels by what they are for: the first line whose part of a name fits counts.
CATEGORIES = (
    ("matrix products", ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas")),
    ("norms", ("rms_norm", "layer_norm", "column_sum")),
    ("convolution", ("convolution", "conv")),
    ("delta rule", ("prepare", "sweep", "gradients_kernel", "outputs_kernel", "join_pairs")),
    ("selective scan", ("scan", "segment", "tiled_", "sum_gradients")),
    ("SwiGLU", ("swiglu",)),
    ("loss", ("row_losses", "cross_entropy", "softmax")),
    ("embedding", ("embedding", "sorted_backward", "sort", "indexing")),
    ("optimiser", ("norm_kernel", "total_kernel", "update_kernel", "multi_tensor", "adam")),
    ("copies and the rest", ("",)),
)


def category(kernel: str) -> str:
    """What a kernel is for, by its name."""
    return next(name for name, parts in CATEGORIES if any(part in kernel.lower() for part in parts))


def profile(work: Work, steps: int = 2) -> dict[str, Any]:
    """Milliseconds per step by category and by kernel, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            work()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            times.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e3 / steps)
    kernels = [
        {"kernel": name[:120], "ms": sum(found), "calls": len(found) / steps, "category": category(name)}
        for name, found in times.items()
        if not name.startswith(("Memset", "gpu_"))
    ]
    kernels.sort(key=lambda row: -row["ms"])
    by_category: dict[str, float] = {}
    for row in kernels:
        by_category[row["category"]] = by_category.get(row["category"], 0.0) + row["ms"]
    ordered = dict(sorted(by_category.items(), key=lambda item: -item[1]))
    return {"categories": ordered, "kernels": kernels[:40], "total_ms": sum(ordered.values())}


def profile_text(found: dict[str, Any], lines: int = 25) -> str:
    """The profile as a table."""
    rows = [f"{name:<24}{ms:>9.2f} ms" for name, ms in found["categories"].items()]
    rows += [f"{'all kernels':<24}{found['total_ms']:>9.2f} ms", ""]
    rows += [
        f"{row['ms']:>9.3f} ms {row['calls']:>6.0f} x  {row['category']:<20} {row['kernel'][:80]}"
        for row in found["kernels"][:lines]
    ]
    return "\n".join(rows)


def lm_report(
    peers: bool, chosen: Callable[[str], bool], keep: Callable[[dict[str, Any]], None], data: Path
) -> None:
    """Time every step `chosen` by name beside its peer, print, and give all rows so far to `keep`."""
    rows: list[dict[str, Any]] = []
    for case in LM_STEPS:
        if not chosen(case.name):
            continue
        folder = data / case.model
        folder.mkdir(parents=True, exist_ok=True)
        random_shards(folder, case.vocabulary)
        row, work = measure_ours(case, folder)
        row |= {"who": "ours", "profile": profile(work)}
        print(f"{_line(row)}\n\n{profile_text(row['profile'])}\n", flush=True)
        rows.append(row)
        keep({"lm_steps": rows})
        del work
        if peers and case.model.startswith("deltanet"):
            for half_weights in (False, True):
                seconds, peak = measure(fla_work(case, folder, half_weights, False), 10, 3)
                row = case.row(seconds, peak)
                weights = "bfloat16 weights" if half_weights else "autocast"
                row["who"] = f"flash-linear-attention, eager, {weights}"
                print(_line(row), flush=True)
                rows.append(row)
                keep({"lm_steps": rows})


def _line(row: dict[str, Any]) -> str:
    mfu = f"{row['mfu']:>7.1%} MFU" if "mfu" in row else ""
    speed = f"{row['ms']:>8.1f} ms {row['tokens_per_s']:>10,.0f} tokens/s {row['peak_gb']:>6.1f} GB"
    return f"{row['case']:<44}{speed}{mfu}  {row['who']}"
