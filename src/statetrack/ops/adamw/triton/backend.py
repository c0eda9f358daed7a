"""One AdamW step on all weights of a model, in two or three launches that a CUDA graph can capture."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from statetrack.ops.adamw.triton.kernels import COLUMNS, norm_kernel, total_kernel, update_kernel
from statetrack.ops.triton_runtime.compile_ahead import launch
from statetrack.ops.triton_runtime.sizes import block

BLOCK = 1024  # values of a program
SUMMED_BY_ALL = 16_384  # up to so many programs, each adds up the squared norms of all
TOTAL_BLOCK = 8192  # squared norms that one program adds at a time, where there are more


class TableAdamW:
    """The step of a `torch.optim.AdamW` with clipping, in kernels that read addresses from a table.

    The gradients of a CUDA graph have their addresses once its backward is captured, and the table cannot be
    written during capture: call `launch` inside, `fill` after. The optimiser's state is updated in place.
    """

    def __init__(self, optimizer: torch.optim.AdamW, clip: float, copies: Mapping[Tensor, Tensor]):
        self.groups, self.state, self.clip = optimizer.param_groups, optimizer.state, clip
        self.copies = copies
        (self.beta1, self.beta2), self.eps = self.groups[0]["betas"], self.groups[0]["eps"]
        self.rate = self.groups[0]["lr"]
        self.rows: list[Tensor] = []  # of the table, by weight
        self.decays: list[Tensor] = []
        self.gradients: list[Tensor] = []
        sizes = [p.numel() for group in self.groups for p in group["params"]]
        programs = sum(-(-size // BLOCK) for size in sizes)
        self.table = torch.zeros(programs, COLUMNS.value, dtype=torch.int64, device=self.rate.device)
        self.decay = torch.zeros(programs, device=self.rate.device)
        self.squares = torch.zeros(programs, device=self.rate.device)
        self.total = torch.zeros(1, device=self.rate.device)

    def launch(self) -> None:
        """Launch both kernels for the gradients there are now."""
        self.rows, self.decays, self.gradients = [], [], []
        for group in self.groups:
            for p in group["params"]:
                grad = self.copies.get(p, p).grad
                if grad is not None and p.numel():
                    # held, because a copy made by contiguous() must live as long as its address is used
                    self.gradients.append(grad.contiguous())
                    self._add(p, self.gradients[-1], self.state[p], group["weight_decay"])
        programs = sum(map(len, self.rows))
        if not programs:
            return
        if not (self.table.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.fill()
        constants: dict[str, Any] = {"BLOCK": BLOCK, "num_warps": 4}
        launch(norm_kernel, (programs,))(self.table, self.squares, **constants)
        squares, summed = self.squares, programs
        if programs > SUMMED_BY_ALL:
            squares, summed = self.total, 1
            total_constants: dict[str, Any] = {"BLOCK": TOTAL_BLOCK, "num_warps": 8}
            launch(total_kernel, (1,))(self.squares, self.total, programs, **total_constants)
        constants["BP"] = block(summed)
        launch(update_kernel, (programs,))(
            self.table, self.decay, squares, self.rate, summed, float(self.clip),
            self.beta1, self.beta2, math.log(self.beta1), math.log(self.beta2), self.eps, **constants,
        )  # fmt: skip

    def _add(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], decay: float) -> None:
        """The rows of the table for one weight, one per program."""
        start = torch.arange(0, p.numel(), BLOCK)
        rows = torch.zeros(len(start), COLUMNS.value, dtype=torch.int64)
        for column, tensor in enumerate((p, grad, state["exp_avg"], state["exp_avg_sq"])):
            rows[:, column] = tensor.data_ptr() + start * tensor.element_size()
        rows[:, 4] = state["step"].data_ptr()
        rows[:, 5] = (p.numel() - start).clamp(max=BLOCK)
        rows[0, 6] = 1
        copy = self.copies.get(p)
        if copy is not None:
            rows[:, 7] = copy.data_ptr() + start * copy.element_size()
        self.rows.append(rows)
        self.decays.append(torch.full((len(start),), decay))

    def fill(self) -> None:
        """Write the addresses of the last `launch` where its kernels read them."""
        rows, decays = torch.cat(self.rows), torch.cat(self.decays)
        self.table[: len(rows)].copy_(rows)
        self.decay[: len(rows)].copy_(decays)

    def norm(self) -> Tensor:
        """The norm of the gradients in the last step, before clipping; a scalar."""
        return self.squares[: sum(map(len, self.rows))].sum().sqrt()


def refuses(optimizer: torch.optim.Optimizer) -> str | None:
    """Why the kernels cannot take this optimiser's step, or None."""
    if type(optimizer) is not torch.optim.AdamW:
        return "it is not AdamW"
    groups = optimizer.param_groups
    first = groups[0]
    if not all(isinstance(group["lr"], Tensor) and group["lr"] is first["lr"] for group in groups):
        return "its groups do not share one rate that is a tensor"
    if any(group[name] != first[name] for group in groups for name in ("betas", "eps")):
        return "its groups differ in more than their decay"
    if any(group["amsgrad"] or group["maximize"] for group in groups):
        return "amsgrad and maximize are not offered there"
    parameters = [p for group in groups for p in group["params"]]
    if any("exp_avg" not in optimizer.state.get(p, {}) for p in parameters):
        return "it has not taken a step"
    tensors = [t for p in parameters for t in (p, *optimizer.state[p].values())]
    if not all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors):
        return "a weight or a moment is not contiguous float32"
    if any(t.device != first["lr"].device for t in tensors):
        return "weights are on several devices"
    return "a beta is 0" if min(first["betas"]) <= 0 else None
