"""The cases timed on a GPU: forward and backward of an op, ours and the best peer's, and a lower bound."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statetrack.bench.cases import Work
from statetrack.bench.gpu_floor import Floor, peer_module, short_name
from statetrack.bench.gpu_gated_cases import GpuGatedAttention, GpuGatedDelta
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.selective_scan import selective_scan


@dataclass(frozen=True)
class GpuDeltaRule:
    """The delta rule; the peer is flash-linear-attention, recurrent in float32, chunked in bfloat16."""

    B: int
    T: int
    H: int
    d: int
    dtype: torch.dtype = torch.float32

    peer_name = "flash-linear-attention"

    @property
    def name(self) -> str:
        return f"delta_rule B{self.B} T{self.T} H{self.H} d{self.d} {short_name(self.dtype)}"

    @property
    def floor(self) -> Floor:
        """Read q, k, v, beta, write o; back: read them and do, write four gradients. (6 + 14) d^2 a step."""
        steps, size = self.B * self.T * self.H, self.dtype.itemsize
        return Floor(
            steps * size * (11 * self.d + 3),
            20.0 * steps * self.d**2,
            matrix=self.dtype != torch.float32,
        )

    def _inputs(self) -> tuple[list[Tensor], Tensor]:
        generator = torch.Generator("cuda").manual_seed(0)
        shape, like = (self.B, self.T, self.H, self.d), {"generator": generator, "device": "cuda"}
        q, k, v, do = (torch.randn(shape, **like).to(self.dtype) for _ in range(4))
        beta = (2 * torch.rand(shape[:3], **like)).to(self.dtype)
        return [x.requires_grad_() for x in (q, k, v, beta)], do

    def ours(self) -> Work:
        inputs, do = self._inputs()

        def work() -> None:
            o, _ = delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
            torch.autograd.grad(o, inputs, do)

        return work

    def peer(self) -> Work:
        rules = peer_module("fla.ops.delta_rule", self.peer_name)
        by_step = self.dtype == torch.float32  # its chunked form does not support float32
        rule = rules.fused_recurrent_delta_rule if by_step else rules.chunk_delta_rule
        inputs, do = self._inputs()

        def work() -> None:
            o, _ = rule(*inputs, use_qk_l2norm_in_kernel=True)
            torch.autograd.grad(o, inputs, do)

        return work


@dataclass(frozen=True)
class GpuSelectiveScan:
    """The selective scan with all arguments of a Mamba layer; the peer is the CUDA scan of mamba-ssm."""

    B: int
    T: int
    D: int
    N: int
    dtype: torch.dtype = torch.float32

    peer_name = "mamba-ssm"

    @property
    def name(self) -> str:
        return f"selective_scan B{self.B} T{self.T} D{self.D} N{self.N} {short_name(self.dtype)}"

    @property
    def floor(self) -> Floor:
        """Read u, delta, z, write y; back: read those and dy, write three gradients. About 5 + 14 a state."""
        cells, size = self.B * self.T * self.D, self.dtype.itemsize
        return Floor(
            size * (11.0 * cells + 6 * self.B * self.T * self.N),
            19.0 * cells * self.N,
            exponentials=2.0 * cells * self.N,
        )

    def _inputs(self) -> tuple[list[Tensor], Tensor]:
        generator = torch.Generator("cuda").manual_seed(0)
        like = {"generator": generator, "device": "cuda"}
        u, z, delta, dy = (torch.randn(self.B, self.D, self.T, **like).to(self.dtype) for _ in range(4))
        A = -torch.arange(1.0, self.N + 1, device="cuda").repeat(self.D, 1)
        B, C = (torch.randn(self.B, self.N, self.T, **like).to(self.dtype) for _ in range(2))
        D, bias = torch.ones(self.D, device="cuda"), torch.full((self.D,), -3.0, device="cuda")
        return [x.requires_grad_() for x in (u, delta, A, B, C, D, z, bias)], dy

    def _work(self, scan: Any) -> Work:
        inputs, dy = self._inputs()

        def work() -> None:
            torch.autograd.grad(scan(*inputs, delta_softplus=True), inputs, dy)

        return work

    def ours(self) -> Work:
        return self._work(selective_scan)

    def peer(self) -> Work:
        return self._work(
            peer_module("mamba_ssm.ops.selective_scan_interface", self.peer_name).selective_scan_fn
        )


GpuCase = GpuDeltaRule | GpuSelectiveScan | GpuGatedAttention | GpuGatedDelta

GPU_CASES: list[GpuCase] = [
    GpuDeltaRule(512, 32, 4, 32),
    GpuDeltaRule(64, 512, 4, 32),
    GpuDeltaRule(16, 2048, 8, 128, torch.bfloat16),
    GpuDeltaRule(1, 32768, 16, 128, torch.bfloat16),
    GpuSelectiveScan(1024, 40, 256, 16),
    GpuSelectiveScan(512, 32, 256, 16),
    GpuSelectiveScan(8, 2048, 2048, 16, torch.bfloat16),
    GpuSelectiveScan(1, 32768, 2048, 16, torch.bfloat16),
    *(
        case(B, T, H, 128, per_head, signed)
        for case in (GpuGatedAttention, GpuGatedDelta)
        for B, T, H in ((16, 2048, 8), (1, 32768, 16))
        for per_head in (False, True)
        for signed in (False, True)
    ),
]
