"""The cases on a GPU whose ops have gates."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from statetrack.bench.cases import Work
from statetrack.bench.gpu_floor import Floor, peer_module, short_name
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.gated_linear_attention import gated_linear_attention


@dataclass(frozen=True)
class _Gated:
    """Sizes and gates. With `signed` the gates are numbers in [-1, 1], which no peer takes: it is given the
    logarithms of their sizes."""

    B: int
    T: int
    H: int
    d: int
    per_head: bool
    signed: bool
    dtype: torch.dtype = torch.bfloat16

    op: ClassVar[str]
    peer_name: ClassVar[str] = "flash-linear-attention"

    @property
    def name(self) -> str:
        gates = f"{'head' if self.per_head else 'channel'} {'[-1,1]' if self.signed else '[0,1]'}"
        return f"{self.op} B{self.B} T{self.T} H{self.H} d{self.d} {short_name(self.dtype)} {gates}"

    def _drawn(self) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """q, k, v; the gradient of outputs; betas up to 2; gates in [0, 1], near 1 as trained ones are."""
        like: dict[str, Any] = {"generator": torch.Generator("cuda").manual_seed(0), "device": "cuda"}
        shape = self.B, self.T, self.H, self.d
        q, k, v, do = (torch.randn(shape, **like).to(self.dtype) for _ in range(4))
        beta = (2 * torch.rand(shape[:3], **like)).to(self.dtype)
        gates = torch.rand(shape[:3] if self.per_head else shape, **like) ** (1 / 16)
        return [q, k, v], do, beta, gates

    def _given(self, gates: Tensor) -> Tensor:
        """What ours gets: numbers of which about half are negative, or logarithms."""
        return gates * (1 - 2 * (gates < 0.96).float()) if self.signed else gates.log()


@dataclass(frozen=True)
class GpuGatedAttention(_Gated):
    """Gated linear attention with a gate per channel or per head; the peer is flash-linear-attention's."""

    op = "gated"

    @property
    def floor(self) -> Floor:
        """Read q, k, v, the gates, write o; back: read them and do, write four gradients.

        Gates and their gradients are float32. The recurrence takes (5 + 12) d^2 operations a step.
        """
        steps, gates = self.B * self.T * self.H, 1 if self.per_head else self.d
        return Floor(
            steps * (self.dtype.itemsize * 11 * self.d + 4 * 3 * gates),
            17.0 * steps * self.d**2,
            exponentials=2.0 * steps * gates,
            matrix=self.dtype != torch.float32,
        )

    def ours(self) -> Work:
        (q, k, v), do, _, gates = self._drawn()
        gate = self._given(gates)
        leaves = [x.requires_grad_() for x in (q, k, v, gate)]
        g, a = (None, gate) if self.signed else (gate, None)

        def work() -> None:
            o, _ = gated_linear_attention(q, k, v, g, a=a)
            torch.autograd.grad(o, leaves, do)

        return work

    def peer(self) -> Work:
        if self.per_head:
            rule = peer_module("fla.ops.simple_gla", self.peer_name).chunk_simple_gla
        else:
            rule = peer_module("fla.ops.gla", self.peer_name).chunk_gla
        qkv, do, _, gates = self._drawn()
        leaves = [x.requires_grad_() for x in (*qkv, gates.log())]

        def work() -> None:
            o, _ = rule(*leaves)
            torch.autograd.grad(o, leaves, do)

        return work


@dataclass(frozen=True)
class GpuGatedDelta(_Gated):
    """The delta rule with a gate per channel (KDA) or per head (Gated DeltaNet), and the same peer's."""

    op = "gated delta"

    @property
    def floor(self) -> Floor:
        """As for gated linear attention, with beta. The recurrence takes (7 + 17) d^2 operations a step."""
        steps, gates = self.B * self.T * self.H, 1 if self.per_head else self.d
        return Floor(
            steps * (self.dtype.itemsize * (11 * self.d + 3) + 4 * 3 * gates),
            24.0 * steps * self.d**2,
            exponentials=2.0 * steps * gates,
            matrix=self.dtype != torch.float32,
        )

    def ours(self) -> Work:
        (q, k, v), do, beta, gates = self._drawn()
        gate = self._given(gates)
        leaves = [x.requires_grad_() for x in (q, k, v, beta, gate)]
        g, a = (None, gate) if self.signed else (gate, None)

        def work() -> None:
            o, _ = delta_rule(q, k, v, beta, g=g, a=a, use_qk_l2norm_in_kernel=True)
            torch.autograd.grad(o, leaves, do)

        return work

    def peer(self) -> Work:
        """KDA's gates are within what `safe_gate` asks for, with which it is faster."""
        options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
        if self.per_head:
            rule = peer_module("fla.ops.gated_delta_rule", self.peer_name).chunk_gated_delta_rule
        else:
            rule = peer_module("fla.ops.kda", self.peer_name).chunk_kda
            options["safe_gate"] = True
        (q, k, v), do, beta, gates = self._drawn()
        leaves = [x.requires_grad_() for x in (q, k, v, gates.log(), beta)]

        def work() -> None:
            o, _ = rule(*leaves, **options)
            torch.autograd.grad(o, leaves, do)

        return work
