"""One step of training. On a GPU it is one CUDA graph and one launch; elsewhere it is eager.

At width 128 a step is some 150 kernels of a few microseconds each: launched one by one from Python they leave
the GPU idle most of the time. So everything a step needs lives on the device: the random numbers of its data,
the learning rate (a table), the count of steps, the running sum of losses.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from statetrack.layers.norm_loss import collected_norm_loss, mean_norm_loss
from statetrack.ops.adamw import RecordedAdamW, recorded_adamw
from statetrack.ops.backends import prefers_native, prefers_triton
from statetrack.ops.checks import is_checked
from statetrack.ops.cross_entropy import cross_entropy
from statetrack.spec import RunSpec
from statetrack.tasks import IGNORE, Batch
from statetrack.training.consistency import logit_scatter
from statetrack.training.half_weights import HalfWeights
from statetrack.training.initial_states import InitialStates
from statetrack.training.next_tokens import NextTokens
from statetrack.training.optimizer import begin_stage, learning_rate, learning_rates
from statetrack.training.packing import Packer
from statetrack.training.precision import autocast
from statetrack.training.protocols import WHOLE, Source
from statetrack.training.source import read_where_labelled, real_positions
from statetrack.training.state import TrainingState

EAGER_FIRST = 2  # steps of a width that run before it is captured: they load and compile what it needs


class GraphStep:
    """The step of one process: draw a batch, take a step of AdamW, add the loss to the running sum.

    Benchmarks turn off what they measure: `packer` None, `compiles_ahead` or `records_adamw` False.
    """

    compiles_ahead = True  # Triton's kernels side by side before the first steps
    records_adamw = True  # clipping, AdamW and the bfloat16 copies by our own kernels, where graphs are used

    def __init__(
        self,
        spec: RunSpec,
        state: TrainingState,
        source: Source,
        say: Callable[[str], None],
        graphs: bool = True,
    ):
        self.spec, self.state, self.source, self.say = spec, state, source, say
        self.device = state.device
        self.count = torch.tensor([state.step], device=self.device)
        self.rates = learning_rates(spec.training).to(self.device)
        self.rate = state.optimizer.param_groups[0]["lr"]
        for group in state.optimizer.param_groups:
            group["lr"] = self.rate
        self.graphs: dict[int, _Graph] = {}  # by width
        self.seen: dict[int, int] = {}
        self.half_weights: HalfWeights | None = None
        self.update: RecordedAdamW | None = None  # of the last step
        self.norm = torch.zeros((), device=self.device)  # of the last gradients, where `update` is None
        self.packer = Packer(spec) if self._may_pack() else None
        self.next_tokens = NextTokens(spec, state.model) if spec.task.labels == "next" else None
        from_empty = spec.training.initial_states == "empty"
        self.initial_states = None if from_empty else InitialStates(spec, state)
        self.uses_graphs = graphs and self.device.type == "cuda"
        # of its own: a graph cannot be captured on the default one, and runs that share a GPU overlap
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def on_stream(self) -> AbstractContextManager:
        """Where everything that touches the training state must run."""
        return torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext()

    def __call__(self) -> None:
        begin_stage(self.state.optimizer, self.state.step, self.spec.training)
        width = self.source.width(self.state.step)
        self.seen[width] = self.seen.get(width, 0) + 1
        if self.uses_graphs and width not in self.graphs and self.seen[width] > EAGER_FIRST:
            self._capture(width)
        self.source.prepare(self.state.step)
        if width in self.graphs:
            self.graphs[width].replay(self)
            self.update = self.graphs[width].update
        else:
            drawn, self.update = self.begin(self.draw()), self.recorded_update()
            if self.seen[width] <= EAGER_FIRST:
                self._compile_kernels(*drawn)
            self.arithmetic(*drawn, self.update)
        self.state.step += 1

    def last_rate(self) -> float:
        return learning_rate(self.state.step - 1, self.spec.training)

    def last_norm(self) -> float | None:
        if not self.spec.training.clip:
            return None
        return (self.norm if self.update is None else self.update.norm()).item()

    def draw(self) -> Batch:
        return self.source.batch(self.state.step, WHOLE, self.state.generator)

    def begin(self, batch: Batch) -> tuple[Batch, list[Any] | None]:
        """The batch as it is trained on, and the states it starts from; None: empty ones.

        With `draw`, everything random in a step: both take their numbers from the generator of the data, in
        this order and in no other place, and a graph advances it by as many as an eager step does.
        """
        return (batch, None) if self.initial_states is None else self.initial_states.begin(batch)

    def recorded_update(self) -> RecordedAdamW | None:
        """The optimiser's step as a graph holds it, where there are graphs and it can be had.

        Eager steps before the recording take it too: that compiles and loads its kernels. Under autocast it
        brings with it the copies of the weights that it keeps up to date, one for all graphs.
        """
        training, update = self.spec.training, None
        if self.uses_graphs and self.records_adamw:
            if training.precision == "bfloat16" and self.half_weights is None:
                self.half_weights = HalfWeights(self.state.model)
            copies = None if self.half_weights is None else self.half_weights.of
            update = recorded_adamw(self.state.optimizer, training.clip, copies)
        if update is None:  # nobody would keep the copies up to date
            self.half_weights = None
        return update

    def arithmetic(self, batch: Batch, states: list[Any] | None, update: RecordedAdamW | None = None) -> None:
        """Everything but the data. Nothing here is random, or waits for the device once it is recorded."""
        state, clip = self.state, self.spec.training.clip
        state.optimizer.zero_grad()  # before the forward pass, which then has that memory
        if self.half_weights is not None:
            self.half_weights.zero_grad()
        loss, last_states, logits = self._loss(*self._arguments(batch, states))
        loss.backward()
        if self.initial_states is not None and states is not None:
            self.initial_states.end(batch, last_states, logits)
        self.rate.copy_(self.rates.index_select(0, self.count).squeeze())
        if update is not None:
            update.launch()
        else:
            if clip:
                self.norm.copy_(torch.nn.utils.clip_grad_norm_(state.model.parameters(), clip))
            state.optimizer.step()
        state.loss_sum += loss.detach()
        self.count += 1

    def _compile_kernels(self, batch: Batch, states: list[Any] | None) -> None:
        """Compile the kernels of the arithmetic side by side, if they are Triton's; nothing else happens."""
        if not self.compiles_ahead or not prefers_triton(self.state.loss_sum) or is_checked():
            return
        from statetrack.ops.triton_runtime.compile_ahead import compile_ahead

        arguments = self._arguments(batch, states)
        copies = {} if self.half_weights is None else self.half_weights.of
        weights = [copies.get(p, p) for p in self.state.model.parameters() if p.requires_grad]
        compile_ahead(lambda: torch.autograd.grad(self._loss(*arguments)[0], weights, allow_unused=True))

    def _loss(
        self, inputs: Tensor, options: dict[str, Any], targets: Tensor
    ) -> tuple[Tensor, list[Any], Tensor]:
        """The loss, the states in which the sequences end, and what the model gave: logits, for classes."""
        model, training = self.half_weights or self.state.model, self.spec.training
        collected = collected_norm_loss(self.state.model, training.isometry > 0)
        with autocast(self.spec, self.device), collected as lost:
            result, states = model(inputs, **options)
        if self.next_tokens is not None:  # the sum of losses
            return result / (targets != IGNORE).sum().clamp(min=1), states, result
        loss = cross_entropy(
            result,
            targets,
            IGNORE,
            centred=training.centred_gradient,
            z_loss=training.z_loss,
            smoothing=training.label_smoothing,
        )
        if training.isometry:
            real = real_positions(self.spec.task, inputs, options.get("at"), targets)
            loss = loss + training.isometry / len(self.state.model.blocks) * mean_norm_loss(lost, real)
        if training.consistency and self.state.step >= training.short_steps:
            loss = loss + training.consistency * logit_scatter(result, targets)
        return loss, states, result

    def _may_pack(self) -> bool:
        """Whether mixed lengths can be packed; the reference backends would take them one by one."""
        model = self.state.model
        if self.spec.task.labels != "last" or not model.packs or model.packs_by_padding:
            return False
        prefers_kernels = prefers_triton if self.device.type == "cuda" else prefers_native
        return prefers_kernels(self.state.loss_sum)

    def _packs(self, packer: Packer, batch: Batch) -> bool:
        """Whether to pack this batch; on a CPU if that saves a quarter of the rows.

        A packed row is some deviations longer than the mean batch, so that it saves little of a small one.
        Mamba, whose scan pads packed sequences inside on a CPU, gains from a quarter on, others from a tenth.
        """
        return self.device.type == "cuda" or packer.rows < 0.75 * batch.inputs.numel()

    def _arguments(self, batch: Batch, states: list[Any] | None) -> tuple[Tensor, dict[str, Any], Tensor]:
        """Tokens, the model's options, and the targets of the logits it then gives: those that count.

        `states` are those that sequences start from, where these are not empty.
        """
        if states is not None:
            return batch.inputs, {"state": states}, batch.targets
        if self.packer is not None and self._packs(self.packer, batch):
            packed = self.packer(batch)
            return packed.tokens, {"at": packed.at, "packing": packed.packing}, packed.targets
        if self.next_tokens is not None:
            return self.next_tokens(batch)
        return read_where_labelled(self.spec.task, batch)

    def _capture(self, width: int) -> None:
        """Record a step of this width. What cannot be recorded stays eager from then on, and that is said."""
        reason = "values are checked in every step" if is_checked() else None
        before = self.state.generator.get_state()
        if reason is None:
            try:
                self.graphs[width] = _Graph(self)
                return
            except RuntimeError as error:
                reason = _first_line(error)
                # a generator that a failed capture has touched draws no more
                self.state.generator = torch.Generator(self.device)
                self.state.generator.set_state(before)
        self.uses_graphs = False
        self.graphs.clear()
        self.say(f"No CUDA graph, steps are launched kernel by kernel: {reason}")


class _Graph:
    """One captured step. Data that cannot be drawn inside are drawn before and copied to its own place."""

    def __init__(self, step: GraphStep):
        self.batch: Batch | None = None if step.source.capturable else step.draw()
        self.first = self.batch is not None  # drawn already
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(step.state.generator)
        self.update = step.recorded_update()
        with torch.cuda.graph(self.graph, stream=step.stream):
            batch = step.draw() if self.batch is None else self.batch
            step.arithmetic(*step.begin(batch), self.update)
        if self.update is not None:
            self.update.fill()

    def replay(self, step: GraphStep) -> None:
        if self.batch is not None and not self.first:
            for place, drawn in zip(self.batch, step.draw(), strict=True):
                place.copy_(drawn)
        self.first = False
        self.graph.replay()


def _first_line(error: BaseException) -> str:
    """What went wrong first: leaving a broken capture raises an error of its own."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).strip().partition("\n")[0]
