"""Mamba (Gu and Dao 2023), with transitions a in [0, 1] or, as 2 a - 1, in [-1, 1]."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.config import added
from statetrack.errors import UserError, unknown_name
from statetrack.layers.checks import check_sizes
from statetrack.layers.convolution import ShortConvolution
from statetrack.layers.fusion import fuses, may_read
from statetrack.layers.initialisation import log_uniform_steps, no_weight_decay
from statetrack.layers.mixer import Mixer, Packing, offsets
from statetrack.layers.padding import run_padded
from statetrack.layers.precision import at_least_float32
from statetrack.ops.checks import check_eigenvalues
from statetrack.ops.selective_scan import selective_scan
from statetrack.ops.short_convolution import convolved_split


@dataclass(frozen=True)
class MambaConfig:
    """What a Mamba layer is built from (Table 1, tab:LRNNs).

        MambaConfig(eigenvalues="[-1,1]", d_state=16, expand=2)

    `eigenvalues` picks the column of Table 2 (tab:eigenvalue_range): a for "[0,1]", 2 a - 1 for "[-1,1]".
    mamba-ssm calls `convolution` d_conv: docs/porting.md.
    """

    # range of the eigenvalues: exp(delta A) or 2 exp(delta A) - 1
    eigenvalues: Literal["[0,1]", "[-1,1]"] = "[-1,1]"
    d_state: int = 16  # states of a channel
    expand: int = 2  # channels over d_model
    convolution: int = 4  # width of the short convolution
    dt_rank: int | None = None  # d_model / 16, rounded up, when None
    bias: bool = added(False)  # of the projections in and out
    conv_bias: bool = added(True)  # of the short convolution
    dt_min: float = added(1e-3)  # smallest initial step size; they are log-uniform
    dt_max: float = added(0.1)  # largest initial step size
    dt_init_floor: float = added(1e-4)  # initial step sizes below it are raised to it
    # initial weights of dt_proj: uniform in +- dt_scale / sqrt(dt_rank), or all equal to it
    dt_init: Literal["random", "constant"] = added("random")
    dt_scale: float = added(1.0)  # see dt_init

    def build(self, d_model: int, layers: int) -> "Mamba":
        return Mamba(self, d_model, layers)


class MambaState(NamedTuple):
    h: Tensor  # (B, D, N), float32
    convolution: Tensor  # (B, D, width - 1)


class Mamba(Mixer):
    """h_t = a_t h_{t-1} + Delta_t B_t u_t,  y_t = C_t h_t + D u_t, a = exp(Delta A) or 2 exp(Delta A) - 1.

        u, z = W_in x, u = silu(conv(u))        Delta', B, C = W_x u        Delta = softplus(W_dt Delta' + b)
        out_t = W_out (y_t silu(z_t))           A = -exp(A_log)

    Shapes: x, out (B, T, d_model); the state h (B, D, N) in float32, D = expand * d_model, N = d_state. The
    transition is diagonal with the a as eigenvalues, in (0, 1) for "[0,1]" and in (-1, 1) for "[-1,1]".
    Returns out and the state to go on from. With `attention_mask` (B, T), True at real steps, padding on
    either side is left out, and out is 0 there. Parameters have the names they have in mamba-ssm and
    transformers, so weights can be copied.

    >>> layer = Mamba(MambaConfig(eigenvalues="[-1,1]"), d_model=64)
    >>> y, state = layer(torch.randn(2, 16, 64))                     # B, T, d_model
    >>> next_y, state = layer(torch.randn(2, 1, 64), state)          # one more step
    >>> y.shape, state.h.shape
    (torch.Size([2, 16, 64]), torch.Size([2, 128, 16]))
    """

    packs = True

    def __init__(self, config: MambaConfig, d_model: int, layers: int = 1):
        super().__init__()
        check_eigenvalues("Mamba", config.eigenvalues)
        if config.dt_rank == "auto":
            raise UserError('Mamba: dt_rank is "auto", which is mamba-ssm\'s name of our default. Use None.')
        check_sizes(
            "Mamba",
            d_state=config.d_state,
            expand=config.expand,
            convolution=config.convolution,
            dt_rank=config.dt_rank,
        )
        _check_steps(config)
        self.config = config
        D, N = config.expand * d_model, config.d_state
        self.dt_rank = config.dt_rank or math.ceil(d_model / 16)
        self.in_proj = nn.Linear(d_model, 2 * D, bias=config.bias)
        self.conv1d = ShortConvolution(D, config.convolution, bias=config.conv_bias)
        self.x_proj = nn.Linear(D, self.dt_rank + 2 * N, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, D)
        self.A_log = no_weight_decay(nn.Parameter(torch.arange(1, N + 1).float().log().repeat(D, 1)))
        self.D = no_weight_decay(nn.Parameter(torch.ones(D)))
        self.out_proj = nn.Linear(D, d_model, bias=config.bias)
        largest = config.dt_scale * self.dt_rank**-0.5
        if config.dt_init == "constant":
            nn.init.constant_(self.dt_proj.weight, largest)
        else:
            nn.init.uniform_(self.dt_proj.weight, -largest, largest)
        with torch.no_grad():
            steps = log_uniform_steps(D, config.dt_min, config.dt_max, config.dt_init_floor)
            self.dt_proj.bias.copy_(steps)
            # the residual stream sums the outputs of all blocks
            self.out_proj.weight /= math.sqrt(layers)

    def forward(
        self,
        x: Tensor,
        state: MambaState | None = None,
        *,
        packing: Packing | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, MambaState | None]:
        if attention_mask is not None:
            return run_padded("Mamba", self, x, attention_mask, state, packing)
        u, z, delta, delta_bias, B, C, convolution = self._controls(x, state, packing)
        y, h = selective_scan(
            u,
            delta,
            self._A(),
            B,
            C,
            self.D,
            z,
            delta_bias=delta_bias,
            delta_softplus=True,
            return_last_state=True,
            eigenvalues=self.config.eigenvalues,
            initial_state=None if state is None else state.h,
            **offsets(packing),
        )
        return self.out_proj(y.mT), None if convolution is None else MambaState(h, convolution)

    def _A(self) -> Tensor:
        return -self.A_log.exp()

    def _controls(self, x: Tensor, state: MambaState | None, packing: Packing | None = None):
        """Inputs of the scan: u, z (B, D, T); delta (B, D, T) and its bias; B, C (B, N, T); next past."""
        product = self.in_proj(x)
        u, z = product.chunk(2, dim=-1)
        if state is None and fuses(x) and may_read(ShortConvolution, self.conv1d):
            convolution = self.conv1d.next_state(u, None, packing)
            widths, taps, bias = (u.shape[-1], z.shape[-1]), self.conv1d.taps, self.conv1d.bias
            u, z = convolved_split(
                product, widths, [taps], [] if bias is None else [bias], **offsets(packing)
            )
        else:
            options = {} if packing is None else {"packing": packing}
            past = None if state is None else state.convolution
            u, convolution = self.conv1d(u, past, silu=True, **options)
        dt, B, C = self.x_proj(u).split([self.dt_rank, self.config.d_state, self.config.d_state], dim=-1)
        delta, bias = self._steps(dt)
        return u.mT, z.mT, delta.mT, bias, B.mT, C.mT, convolution

    def _steps(self, dt: Tensor) -> tuple[Tensor, Tensor | None]:
        """delta (B, T, D) before the softplus, and the bias that the scan still has to add to it.

        The scan adds the bias in float32, also where the product is in half precision.
        """
        if may_read(nn.Linear, self.dt_proj):
            return F.linear(dt, self.dt_proj.weight), self.dt_proj.bias
        return self.dt_proj(dt), None

    def extra_repr(self) -> str:
        """The eigenvalue range, and the number of states of each channel."""
        return f"eigenvalues={self.config.eigenvalues}, d_state={self.config.d_state}"

    @torch.no_grad()
    def transition_eigenvalues(self, x: Tensor, state: MambaState | None = None) -> Tensor:
        """(B, T, D, N): the diagonal of A(x_t), channel by channel."""
        _, _, delta, bias, *_ = self._controls(x, state)
        delta = at_least_float32(delta).mT
        delta = F.softplus(delta if bias is None else delta + bias)
        a = torch.exp(delta[..., None] * self._A())
        return a if self.config.eigenvalues == "[0,1]" else 2 * a - 1


def _check_steps(config: MambaConfig) -> None:
    """Refuse initial step sizes that are none."""
    if config.dt_init not in ("random", "constant"):
        raise unknown_name("Mamba: dt_init", config.dt_init, ("random", "constant"))
    if not 0 < config.dt_min <= config.dt_max < math.inf:
        raise UserError(
            f"Mamba: dt_min is {config.dt_min} and dt_max {config.dt_max}, expected 0 < dt_min <= dt_max."
        )
    for name in ("dt_init_floor", "dt_scale"):
        if not (getattr(config, name) > 0 and math.isfinite(getattr(config, name))):
            raise UserError(f"Mamba: {name} is {getattr(config, name)}, expected a number above 0.")
