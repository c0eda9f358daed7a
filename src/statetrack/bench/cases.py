"""The cases timed on a CPU: an op, its shape, and the peer; inputs and gradients are the same for all."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from statetrack.bench.xlstm_case import XlstmCase
from statetrack.errors import UserError, require
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.gated_linear_attention import gated_linear_attention
from statetrack.ops.selective_scan import selective_scan

Work = Callable[[], None]  # one forward and backward


@dataclass(frozen=True)
class DeltaRuleCase:
    """Forward and backward of the delta rule, float32; the peer is the PyTorch chunk rule of transformers."""

    B: int
    T: int
    H: int
    d: int

    peer_name = "transformers"

    @property
    def name(self) -> str:
        return f"delta_rule B{self.B} T{self.T} H{self.H} d{self.d}"

    def _inputs(self) -> tuple[list[Tensor], Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (self.B, self.T, self.H, self.d)
        q, k, v, do = (torch.randn(shape, generator=generator) for _ in range(4))
        beta = 2 * torch.rand(shape[:3], generator=generator)
        return [x.requires_grad_() for x in (q, k, v, beta)], do

    def ours(self, backend: str = "auto") -> Work:
        (q, k, v, beta), do = self._inputs()

        def work() -> None:
            o, _ = delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=True, backend=backend)
            o.backward(do)

        return work

    def peer(self) -> Work:
        name = "transformers.models.qwen3_next.modeling_qwen3_next"
        rule = require(name, extra="bench", for_="comparing with transformers").torch_chunk_gated_delta_rule
        (q, k, v, beta), do = self._inputs()
        no_decay = torch.zeros_like(beta)  # the ungated rule is the gated one without decay
        return lambda: rule(q, k, v, no_decay, beta, use_qk_l2norm_in_kernel=True)[0].backward(do)


@dataclass(frozen=True)
class SelectiveScanCase:
    """Forward and backward of the selective scan, float32; the peer is mambapy's parallel scan."""

    B: int
    T: int
    D: int
    N: int
    eigenvalues: str = "[0,1]"

    peer_name = "mambapy"

    @property
    def name(self) -> str:
        return f"selective_scan B{self.B} T{self.T} D{self.D} N{self.N}"

    def _inputs(self) -> tuple[list[Tensor], Tensor]:
        """u, delta (B, T, D), A (D, N), B, C (B, T, N), D (D,) and the gradient of the output, time first."""
        generator = torch.Generator().manual_seed(0)
        u, dy = (torch.randn(self.B, self.T, self.D, generator=generator) for _ in range(2))
        delta = 0.1 * torch.rand(self.B, self.T, self.D, generator=generator)
        A = -torch.arange(1.0, self.N + 1).repeat(self.D, 1)
        B, C = (torch.randn(self.B, self.T, self.N, generator=generator) for _ in range(2))
        D = torch.ones(self.D)
        return [x.requires_grad_() for x in (u, delta, A, B, C, D)], dy

    def ours(self, backend: str = "auto") -> Work:
        (u, delta, A, B, C, D), dy = self._inputs()

        def work() -> None:
            y = selective_scan(
                u.mT, delta.mT, A, B.mT, C.mT, D, eigenvalues=self.eigenvalues, backend=backend
            )
            assert isinstance(y, Tensor)
            y.backward(dy.mT)

        return work

    def peer(self) -> Work:
        """The scan of mambapy's MambaBlock: materialise a and B u for every state, scan, contract with C."""
        pscan = require("mambapy.pscan", extra="bench", for_="comparing with mambapy").pscan
        (u, delta, A, B, C, D), dy = self._inputs()

        def work() -> None:
            a = torch.exp(delta.unsqueeze(-1) * A)
            x = delta.unsqueeze(-1) * B.unsqueeze(2) * u.unsqueeze(-1)
            y = (pscan(a, x) @ C.unsqueeze(-1)).squeeze(3) + D * u
            y.backward(dy)

        return work


@dataclass(frozen=True)
class GatedCase:
    """Forward and backward of Mamba-2's recurrence, float32: a gate per head, values times the step dt.

    The gate is exp(-dt), or 2 exp(-dt) - 1 in [-1,1]. The peer is the scan of transformers' Mamba2, in the
    chunks of its default configuration; it knows gates in [0,1] only, and is that in both ranges.
    """

    B: int
    T: int
    H: int
    d: int
    eigenvalues: str = "[0,1]"

    peer_name = "transformers"

    @property
    def name(self) -> str:
        return f"gated_attention B{self.B} T{self.T} H{self.H} d{self.d}"

    def _inputs(self) -> tuple[list[Tensor], Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (self.B, self.T, self.H, self.d)
        q, k, v, do = (torch.randn(shape, generator=generator) for _ in range(4))
        dt = 0.01 + 0.1 * torch.rand(shape[:3], generator=generator)
        return [x.requires_grad_() for x in (q, k, v, dt)], do

    def ours(self, backend: str = "auto") -> Work:
        (q, k, v, dt), do = self._inputs()

        def work() -> None:
            g, a = (-dt, None) if self.eigenvalues == "[0,1]" else (None, 2 * torch.exp(-dt) - 1)
            o, _ = gated_linear_attention(q, k, v * dt[..., None], g, a=a, scale=1.0, backend=backend)
            o.backward(do)

        return work

    def peer(self) -> Work:
        for_ = "comparing with transformers"
        config = require("transformers.models.mamba2", extra="bench", for_=for_).Mamba2Config
        name = "transformers.models.mamba2.modeling_mamba2"
        scan, steps = require(name, extra="bench", for_=for_).mamba2_chunk_scan, config().chunk_size
        (q, k, v, dt), do = self._inputs()
        A = -torch.ones(self.H)
        return lambda: scan(v, dt, A, k, q, steps).backward(do)


@dataclass(frozen=True)
class KdaCase:
    """Forward and backward of the delta rule with a gate per key channel (KDA), float32.

    The gate is exp(g), or 2 exp(g) - 1 in [-1,1]. The peer is the PyTorch chunk rule of transformers' Kimi
    Linear; it knows gates in [0,1] only, and is that in both ranges.
    """

    B: int
    T: int
    H: int
    d: int
    eigenvalues: str = "[0,1]"

    peer_name = "transformers"
    gate_axes = 4  # (B, T, H, K): one per key channel

    @property
    def name(self) -> str:
        return f"kda B{self.B} T{self.T} H{self.H} d{self.d}"

    def _inputs(self) -> tuple[list[Tensor], Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (self.B, self.T, self.H, self.d)
        q, k, v, do = (torch.randn(shape, generator=generator) for _ in range(4))
        beta = 2 * torch.rand(shape[:3], generator=generator)
        g = -torch.rand(shape[: self.gate_axes], generator=generator)
        return [x.requires_grad_() for x in (q, k, v, beta, g)], do

    def ours(self, backend: str = "auto") -> Work:
        (q, k, v, beta, g), do = self._inputs()

        def work() -> None:
            log, value = (g, None) if self.eigenvalues == "[0,1]" else (None, 2 * torch.exp(g) - 1)
            o, _ = delta_rule(q, k, v, beta, g=log, a=value, use_qk_l2norm_in_kernel=True, backend=backend)
            o.backward(do)

        return work

    def peer(self) -> Work:
        name = "transformers.models.kimi_linear.modeling_kimi_linear"
        rule = require(name, extra="bench", for_="comparing with transformers").chunk_kimi_delta_attention
        (q, k, v, beta, g), do = self._inputs()
        return lambda: rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0].backward(do)


@dataclass(frozen=True)
class GatedDeltaCase(KdaCase):
    """The same with one gate per head (Gated DeltaNet); the peer is the chunk rule of Qwen3-Next."""

    gate_axes = 3  # (B, T, H)

    @property
    def name(self) -> str:
        return f"gated_delta B{self.B} T{self.T} H{self.H} d{self.d}"

    def peer(self) -> Work:
        name = "transformers.models.qwen3_next.modeling_qwen3_next"
        rule = require(name, extra="bench", for_="comparing with transformers").torch_chunk_gated_delta_rule
        (q, k, v, beta, g), do = self._inputs()
        return lambda: rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0].backward(do)


Case = DeltaRuleCase | SelectiveScanCase | GatedCase | KdaCase | GatedDeltaCase | XlstmCase
KINDS = {
    cls.__name__: cls
    for cls in (DeltaRuleCase, SelectiveScanCase, GatedCase, KdaCase, GatedDeltaCase, XlstmCase)
}

CPU_CASES: list[Case] = [
    SelectiveScanCase(8, 512, 256, 16),
    SelectiveScanCase(64, 40, 256, 16),
    DeltaRuleCase(8, 512, 4, 32),
    DeltaRuleCase(64, 33, 4, 32),
    DeltaRuleCase(1, 2048, 8, 128),
    GatedCase(8, 512, 8, 64),
    GatedCase(1, 2048, 8, 64),
    KdaCase(8, 512, 4, 32),
    KdaCase(1, 2048, 4, 32),
    GatedDeltaCase(8, 512, 8, 64),
    GatedDeltaCase(1, 2048, 8, 64),
    XlstmCase(64, 40, "mlstm"),
    XlstmCase(64, 40, "slstm"),
]

LENGTHS = tuple(1024 * 2**i for i in range(7))  # 1k to 64k


def signed_case(case: Case) -> Case | None:
    """The same case with eigenvalues in [-1,1]; None where the range does not change the work."""
    if isinstance(case, DeltaRuleCase | XlstmCase):
        return None
    return dataclasses.replace(case, eigenvalues="[-1,1]")


def growth_cases() -> list[list[Case]]:
    """Each op on sequences of increasing length."""
    return [
        [SelectiveScanCase(1, T, 256, 16) for T in LENGTHS],
        [DeltaRuleCase(1, T, 4, 32) for T in LENGTHS],
    ]


def work_of(case: Case, who: str) -> Work:
    """One side of a comparison: "ours" or "peer"."""
    if who not in ("ours", "peer"):
        raise UserError(f"bench: {who!r} is not known, expected ours or peer.")
    return getattr(case, who)()


def as_dict(case: Case) -> dict:
    return {"kind": type(case).__name__} | dataclasses.asdict(case)


def check_chosen(chosen: Callable[[str], bool], names: list[str]) -> None:
    """Raise an error if no case was selected."""
    if not any(map(chosen, names)):
        raise UserError(f"bench: --only matches no case. There are: {'; '.join(names)}.")
