"""What each small fused kernel is worth: the training step with and without it, in the same CUDA graph.

A variant replaces one kernel by `torch.compile` of the op's reference, or by PyTorch's own fused form where
that is the obvious alternative (AdamW). The last variant takes no fused layer kernel at all and compiles the
whole model. The recurrences stay what they are in every variant. A kernel that is worth less than `KEEP` of
every step it appears in should be deleted.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from statetrack.bench.cases import check_chosen
from statetrack.bench.gpu_steps import GPU_STEPS, seconds_per_step, taking
from statetrack.experiments.tab_chomsky import PROTOCOL
from statetrack.layers import model_config
from statetrack.layers.fusion import fused
from statetrack.ops import cross_entropy, embedding, pack, rms_norm, swiglu
from statetrack.ops.backends import load, replaced_op
from statetrack.spec import EvaluationConfig, RunSpec
from statetrack.tasks import task
from statetrack.training.graph_step import GraphStep
from statetrack.training.source import source_of
from statetrack.training.state import new_state

KEEP = 0.03  # of a training step
# the ops that variants replace, with their tables of backends
REPLACEABLE = {
    "rms_norm": rms_norm.BACKENDS,
    "add_rms_norm": rms_norm.BACKENDS,
    "swiglu": swiglu.BACKENDS,
    "cross_entropy": cross_entropy.BACKENDS,
    "embedding": embedding.BACKENDS,
    "pack": pack.BACKENDS,
}
STEPS, ROUNDS = 200, 3  # a variant is timed this often, in turns with the others


def specs() -> dict[str, RunSpec]:
    """Steps of the paper's protocol: word problems, and formal languages with their mixed lengths."""
    found = {step.name: step.spec for step in GPU_STEPS}
    training = replace(PROTOCOL, precision="bfloat16")
    for name, mixer, layers in (("parity", "deltanet", 2), ("parity", "mamba", 2)):
        model = model_config(mixer, layers=layers)
        spec = RunSpec(task(name), model, training, EvaluationConfig())
        found[f"{name} training step, {mixer} {layers} layers"] = spec.resolved()
    return found


@dataclass(frozen=True)
class Variant:
    """A way to carry out a step. `packs` False pads sequences of mixed lengths instead of packing them."""

    name: str
    ops: tuple[str, ...] = ()  # replaced by torch.compile of their reference
    eager: bool = False  # replaced by the reference itself, one PyTorch kernel after the other
    adamw: bool = True  # our two kernels for clipping, AdamW and the bfloat16 copies of the weights
    packs: bool = True
    compiled_model: bool = False

    @property
    def compiles(self) -> bool:
        """Whether torch.compile has a part in it."""
        return (bool(self.ops) and not self.eager) or self.compiled_model

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for op in self.ops:
                plain = load(REPLACEABLE[op]["reference"])
                function = plain if self.eager else torch.compile(plain, dynamic=False)
                stack.enter_context(replaced_op(op, function))
            if self.compiled_model:
                stack.enter_context(fused(False))
            yield


VARIANTS = (
    Variant("as shipped"),
    Variant("norms compiled", ("rms_norm", "add_rms_norm")),
    Variant("SwiGLU compiled", ("swiglu",)),
    Variant("cross-entropy compiled", ("cross_entropy",)),
    Variant("cross-entropy of PyTorch", ("cross_entropy",), eager=True),
    Variant("embedding compiled", ("embedding",)),
    Variant("AdamW of PyTorch (fused)", adamw=False),
    Variant("packing compiled", ("pack",)),
    Variant("padded instead of packed", packs=False),
    Variant("whole model compiled", compiled_model=True),
    Variant("whole model compiled, AdamW of PyTorch", adamw=False, compiled_model=True),
)


def applies(variant: Variant, spec: RunSpec) -> bool:
    """Whether the step has what the variant replaces."""
    if "swiglu" in variant.ops and spec.model.mlp_ratio == 0:
        return False
    packing = not variant.packs or "pack" in variant.ops
    return spec.task.labels == "last" or not packing


def ablation_report(chosen: Callable[[str], bool], keep: Callable[[dict[str, Any]], None]) -> None:
    """Time every variant of the steps `chosen` by name, print milliseconds and what doing without costs.

    `keep` gets all rows so far after each step.
    """
    rows: list[dict[str, Any]] = []
    steps = specs()
    check_chosen(chosen, list(steps))
    for name, spec in steps.items():
        if not chosen(name):
            continue
        variants = [variant for variant in VARIANTS if applies(variant, spec)]
        times = _times(spec, variants)
        shipped = times["as shipped"]
        print(f"\n{name}\n{'variant':<34}{'ms':>9}{'cost':>9}", flush=True)
        for variant, seconds in times.items():
            cost = None if seconds is None or shipped is None else seconds / shipped - 1
            cells = (
                f"{1e3 * seconds:>9.3f}{cost:>+9.1%}" if seconds and cost is not None else f"{'failed':>9}"
            )
            print(f"{variant:<34}{cells}", flush=True)
            ms = None if seconds is None else 1e3 * seconds
            rows.append({"step": name, "variant": variant, "ms": ms, "cost": cost})
        keep({"ablation": rows})


def _times(spec: RunSpec, variants: list[Variant]) -> dict[str, float | None]:
    """The fastest of a few rounds, in seconds; rounds of variants take turns. None where one cannot run."""
    works: dict[str, Callable[[], None]] = {}
    best: dict[str, float | None] = {}
    for variant in variants:
        best[variant.name] = None
        try:
            works[variant.name] = _work(spec, variant)
        except Exception as error:  # what torch.compile cannot take is a result, too
            print(f"{variant.name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}", flush=True)
    for _ in range(ROUNDS):
        for name, work in works.items():
            seconds = seconds_per_step(work, STEPS)
            before = best[name]
            best[name] = seconds if before is None else min(before, seconds)
    return best


def _work(spec: RunSpec, variant: Variant) -> Callable[[], None]:
    """A function that takes one step, captured already: what a variant replaces is in its graph."""
    said: list[str] = []
    state = new_state(spec, torch.device("cuda"))
    step = GraphStep(spec, state, source_of(spec, state.device), said.append)
    if not variant.packs:
        step.packer = None
    step.records_adamw = variant.adamw
    if variant.compiled_model:
        state.model.compile(dynamic=False)
    step.compiles_ahead = not variant.compiles  # torch.compile has its own way
    work = taking(step)
    with variant.active():
        for _ in range(5):  # two eager steps, the capture, and replays
            work()
        torch.cuda.synchronize()
    if not step.graphs:
        raise RuntimeError(f"no CUDA graph: {' '.join(said)}")
    return work
