"""Whole training steps. On the S5 word problem: ours as one CUDA graph, flash-linear-attention's as its users
run it, both with bfloat16 layers, batch 512 and length 32 (Sec. 5.2). Of the paper's other models and tasks:
ours alone."""

import time
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Generator

from statetrack.bench.cases import Work
from statetrack.bench.gpu_floor import Floor, peer_module
from statetrack.experiments import fig_s5, tab_chomsky
from statetrack.experiments.word_problems import PROTOCOL
from statetrack.layers import model_config
from statetrack.spec import EvaluationConfig, RunSpec
from statetrack.tasks import task
from statetrack.training.graph_step import GraphStep
from statetrack.training.source import source_of
from statetrack.training.state import new_state


@dataclass(frozen=True)
class GpuTrainingStep:
    """DeltaNet [-1,1], width 128, 4 heads, SwiGLU MLP, AdamW, clipping."""

    layers: int

    peer_name = "flash-linear-attention, eager"

    @property
    def name(self) -> str:
        return f"S5 training step, DeltaNet {self.layers} layer{'s' if self.layers > 1 else ''}"

    @property
    def spec(self) -> RunSpec:
        return RunSpec(
            task("s5-swaps"),
            model_config("deltanet-no-conv", layers=self.layers),
            replace(PROTOCOL, precision="bfloat16"),
            EvaluationConfig(),
        ).resolved()

    @property
    def floor(self) -> Floor:
        """Two operations per weight and token forward, four back. Bytes: twelve tensors of width 128 a layer
        each way and four of width 512 in the MLP, in bfloat16, are written and read once."""
        tokens, width = 512 * 33, 128
        weights = self.layers * (4 * width**2 + 3 * width * 4 * width)
        moved = self.layers * 2 * 2 * tokens * 2 * (12 * width + 4 * 4 * width)
        return Floor(moved, 6.0 * weights * tokens, matrix=True)

    def ours(self) -> Work:
        return _graph_step(self.spec)

    def peer(self) -> Work:
        models = peer_module("fla.models", "flash-linear-attention")
        vocabulary, config = self.spec.task.vocab_size, self.spec.training
        model = models.DeltaNetForCausalLM(
            models.DeltaNetConfig(
                hidden_size=128,
                num_heads=4,
                num_hidden_layers=self.layers,
                use_short_conv=False,
                qk_activation="identity",
                allow_neg_eigval=True,
                intermediate_size=512,
                vocab_size=vocabulary,
                fuse_cross_entropy=False,
                use_cache=False,
            )
        ).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        generator = Generator("cuda").manual_seed(0)

        def work() -> None:
            batch = self.spec.task.sample(512, (32, 32), generator)
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(input_ids=batch.inputs).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()

        return work


@dataclass(frozen=True)
class ProtocolStep:
    """A step of the paper's protocol, without a peer: no other library trains these models on these tasks."""

    name: str
    spec: RunSpec

    peer_name = None
    floor = None

    def ours(self) -> Work:
        return _graph_step(self.spec)


def protocol_steps() -> list[ProtocolStep]:
    """Of every model of Table 3, with ours, and of the word problem of swaps: one of each range."""
    panels = {tab_chomsky.PARITY: "parity", tab_chomsky.PLAIN: "arithmetic", fig_s5.SWAPS: "S5 swaps"}
    panels[tab_chomsky.BRACKETS] = "bracketed arithmetic"
    steps: dict[str, ProtocolStep] = {}
    for run in (*tab_chomsky.runs("paper", 1), *fig_s5.runs("paper", 1)):
        model = run.label.replace("[0,1] ", "").replace(" [0,1]", "")
        if run.panel in panels and "[" not in model and "eps" not in model:
            name = f"{panels[run.panel]} step, {model}"
            steps.setdefault(name, ProtocolStep(name, run.spec))
    return list(steps.values())


def _graph_step(spec: RunSpec) -> Work:
    device = torch.device("cuda")
    return taking(GraphStep(spec, new_state(spec, device), source_of(spec, device), print))


def taking(step: GraphStep) -> Work:
    """What takes one step, on the stream of the step."""

    def work() -> None:
        with step.on_stream():
            step()

    return work


GPU_STEPS = [GpuTrainingStep(1), GpuTrainingStep(5)]
PROTOCOL_STEPS = protocol_steps()


def seconds_per_step(work: Work, steps: int = 50) -> float:
    """Mean time of a step among many, after the first ones."""
    for _ in range(6):
        work()
    torch.cuda.synchronize()
    before = time.perf_counter()
    for _ in range(steps):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - before) / steps
