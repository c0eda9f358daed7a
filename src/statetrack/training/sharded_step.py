"""One step of training by several processes, or in several micro-batches: eager, with gradients added up.

Every rank takes its rows of the global batch, in micro-batches one after the other; gradients are summed over
the ranks once, behind the last. The loss is the mean over all labels of the global batch,

    loss = sum over ranks, micro-batches and labels of -log p(label) / number of labels,

so that it does not depend on how the batch was cut, even where rows hold different numbers of labels.

    ddp      every rank has all weights (DistributedDataParallel)
    fsdp     every rank keeps its part of weights, gradients and moments, and gathers a block's weights for
             its forward and again for its backward pass (`fully_shard`; ZeRO-3)
    zero2    as fsdp, but gathered weights stay until the backward pass
"""

import contextlib
import functools
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from statetrack.layers import Model
from statetrack.ops.cross_entropy.reference import cross_entropy_reference
from statetrack.spec import RunSpec
from statetrack.tasks import IGNORE, Batch
from statetrack.training.next_tokens import NextTokens
from statetrack.training.optimizer import begin_stage, learning_rate, learning_rates
from statetrack.training.precision import autocast
from statetrack.training.protocols import Share, Source
from statetrack.training.ranks import Parallel, Ranks
from statetrack.training.source import read_where_labelled
from statetrack.training.state import TrainingState


def shard(model: Model, parallel: Parallel | None) -> None:
    """Leave this rank its part of the weights, in place; with "ddp", or alone, all of them.

    Blocks are sharded one by one and the root holds the rest: the embedding is read by its weight, not
    called, so it could not gather itself.
    """
    if parallel not in ("fsdp", "zero2"):
        return
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # nothing in the model writes into a block's output
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    mesh = init_device_mesh(model.head.weight.device.type, (distributed.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=parallel == "fsdp")


class ShardedStep:
    """A step of this rank's micro-batches, with the gradients of all ranks."""

    def __init__(
        self,
        spec: RunSpec,
        state: TrainingState,
        source: Source,
        ranks: Ranks,
        parallel: Parallel | None,
        micro_batches: int,
    ):
        self.spec, self.state, self.source = spec, state, source
        self.ranks, self.parallel = ranks, parallel
        self.shares = [Share(ranks.rank, ranks.size, i, micro_batches) for i in range(micro_batches)]
        self.rates = learning_rates(spec.training).tolist()
        self.norm: Tensor | None = None  # of the last gradients; sharded with the weights
        self.next_tokens = NextTokens(spec, state.model) if spec.task.labels == "next" else None
        self.model: Any = state.model  # what is called in training; evaluation needs no DDP around it
        if parallel == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            self.model = DistributedDataParallel(state.model)

    def on_stream(self) -> AbstractContextManager:
        return contextlib.nullcontext()

    def last_rate(self) -> float:
        return learning_rate(self.state.step - 1, self.spec.training)

    def last_norm(self) -> float | None:
        if self.norm is None:
            return None
        whole = self.norm.full_tensor() if hasattr(self.norm, "full_tensor") else self.norm  # type: ignore[attr-defined]
        return whole.item()

    def __call__(self) -> None:
        state, clip = self.state, self.spec.training.clip
        begin_stage(state.optimizer, state.step, self.spec.training)
        self.source.prepare(state.step)
        batches = [self.source.batch(state.step, share, state.generator) for share in self.shares]
        labels = self.ranks.sum(sum((batch.targets != IGNORE).sum() for batch in batches))  # type: ignore[arg-type]
        state.optimizer.zero_grad()
        loss = torch.zeros((), device=state.device)
        for i, batch in enumerate(batches):
            with self._summing_gradients(last=i == len(batches) - 1):
                part = self._loss(batch) / labels
                # DDP and FSDP take the mean over ranks, and the sum is wanted
                (part * self.ranks.size).backward()
            loss += part.detach()
        for group in state.optimizer.param_groups:
            group["lr"] = self.rates[state.step]
        if clip:
            self.norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), clip)
        state.optimizer.step()
        state.loss_sum += self.ranks.sum(loss)
        state.step += 1

    def _loss(self, batch: Batch) -> Tensor:
        """The sum over the labels of a micro-batch, which may have none."""
        read = self.next_tokens or functools.partial(read_where_labelled, self.spec.task)
        inputs, options, targets = read(batch)
        with autocast(self.spec, self.state.device):
            result, _ = self.model(inputs, **options)
        if self.next_tokens is not None:
            return result  # the sum already
        training = self.spec.training
        options = training.centred_gradient, training.z_loss, training.label_smoothing
        return cross_entropy_reference(result, targets, IGNORE, *options, reduction="sum")

    def _summing_gradients(self, last: bool) -> AbstractContextManager:
        """Ranks exchange gradients in the last micro-batch's backward pass only."""
        if self.parallel == "ddp" and not last:
            return self.model.no_sync()
        if self.parallel in ("fsdp", "zero2"):
            self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()
