"""The sLSTM block of xLSTM (Beck et al. 2024): a non-linear RNN, the paper's reference for state tracking."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from statetrack.errors import unknown_name
from statetrack.layers.block_diagonal import dense_products, may_be_dense
from statetrack.layers.checks import divide
from statetrack.layers.convolution import ShortConvolution
from statetrack.layers.headwise import HeadNorm, HeadwiseLinear, normalise_heads
from statetrack.layers.initialisation import no_weight_decay, small_init
from statetrack.layers.mixer import Mixer, Packing, offsets, returns_states
from statetrack.layers.padding import run_padded
from statetrack.layers.precision import at_least_float32
from statetrack.ops.slstm import SLSTMCell, slstm

BIASES = ("powerlaw", "linspace", "standard")


@dataclass(frozen=True)
class SLSTMConfig:
    """sLSTM; the preset adds its gated-GELU MLP of width 1.3 d_model."""

    heads: int = 4  # number of heads; outputs feed back to the gates of their own head
    convolution: int = 4  # width of the short convolution in front of the gates i and f; 0 for none
    # initial biases of the forget gate. powerlaw: from 5 to -7 along a head, with an exponent that grows with
    # the depth; linspace: from 3 to 6 along a head; standard: all biases uniform in +- d_model^-1/2, as the
    # paper has them for modular arithmetic (App. E.1)
    bias_init: Literal["powerlaw", "linspace", "standard"] = "powerlaw"

    def build(self, d_model: int, layers: int) -> "SLSTM":
        return SLSTM(self, d_model)


class SLSTMState(NamedTuple):
    cell: SLSTMCell  # h, c, n, m, each (B, H, D), float32
    convolution: Tensor | None  # (B, d_model, 3)


class SLSTM(Mixer):
    """c_t = f_t c_{t-1} + i_t tanh(z_t),  n_t = f_t n_{t-1} + i_t,  y_t = norm(sigmoid(o_t) c_t / n_t).

        i, f from silu(conv(x)); z, o from x; each plus b + R h_{t-1}; i = exp, f = sigmoid

    All matrices are block-diagonal, one block per head. Forward and initialisation are those of the xlstm
    package. Shapes: x, y (B, T, d_model); the state h, c, n, m, each (B, H, D) with D = d_model / H, in
    float32 in every precision. Not linear: h_{t-1} enters the gates, so it can track any finite automaton,
    one step after the other. Returns y and the state to go on from.

    >>> layer = SLSTM(SLSTMConfig(heads=4), d_model=64)
    >>> y, state = layer(torch.randn(2, 16, 64))                     # B, T, d_model
    >>> y.shape, state.cell.h.shape
    (torch.Size([2, 16, 64]), torch.Size([2, 4, 16]))
    """

    packs = True
    packs_by_padding = True

    def __init__(self, config: SLSTMConfig, d_model: int):
        super().__init__()
        if config.bias_init not in BIASES:
            raise unknown_name("SLSTM: bias_init", config.bias_init, BIASES)
        self.config, H = config, config.heads
        D = divide("SLSTM", d_model, H, "heads")
        self.convolution = None
        if config.convolution:
            self.convolution = ShortConvolution(d_model, config.convolution, bias=True)
        self.to_i, self.to_f, self.to_z, self.to_o = (HeadwiseLinear(d_model, H) for _ in range(4))
        self.recurrent = no_weight_decay(nn.Parameter(torch.zeros(H, D, 4 * D)))
        self.bias = no_weight_decay(nn.Parameter(torch.zeros(H, 4, D)))
        self.norm = HeadNorm(H, D)
        for linear in (self.to_i, self.to_f, self.to_z, self.to_o):
            small_init(linear.weight, d_model)
        if config.bias_init == "standard":
            nn.init.uniform_(self.bias, -(d_model**-0.5), d_model**-0.5)
        self.place(0, 1)

    @torch.no_grad()
    def place(self, layer: int, layers: int) -> None:
        """Set the initial biases of the forget gate, which depend on the depth."""
        D, device = self.bias.shape[-1], self.bias.device
        if self.config.bias_init == "powerlaw":
            depth = layer / (layers - 1) if layers > 1 else 0.0
            self.bias[:, 1] = 5 - 12 * torch.linspace(0, 1, D, device=device) ** (0.3 + 1.3 * depth)
        elif self.config.bias_init == "linspace":
            self.bias[:, 1] = torch.linspace(3, 6, D, device=device)

    def forward(
        self,
        x: Tensor,
        state: SLSTMState | None = None,
        *,
        packing: Packing | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, SLSTMState | None]:
        if attention_mask is not None:
            return run_padded("SLSTM", self, x, attention_mask, state, packing)
        c, convolution = self._convolved(x, state, packing)
        bias = None
        if may_be_dense(x, self.to_i, self.to_f, self.to_z, self.to_o):
            products = dense_products((c, x), ((self.to_i, self.to_f), (self.to_z, self.to_o)))
            gates, bias = products.unflatten(-1, (4, self.config.heads, -1)).transpose(2, 3), self.bias
        else:
            gates = self._gates(x, c)
        cell = None if state is None else state.cell
        h, cell = slstm(gates, self.recurrent, bias=bias, initial_state=cell, **offsets(packing))
        after = SLSTMState(cell, convolution) if returns_states(packing) else None
        return normalise_heads(self.norm, h, x.dtype), after

    def _convolved(
        self, x: Tensor, state: SLSTMState | None, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """What the gates i and f read, and the next past of the convolution."""
        if self.convolution is None:
            return x, None
        past = None if state is None else state.convolution
        return self.convolution(x, past, silu=True, packing=packing)

    def _gates(self, x: Tensor, c: Tensor) -> Tensor:
        """The gates i, f, z, o before R h_{t-1} is added, (B, T, H, 4, D)."""
        gates = (self.to_i(c), self.to_f(c), self.to_z(x), self.to_o(x))
        heads = torch.stack([at_least_float32(g).unflatten(-1, (self.config.heads, -1)) for g in gates], -2)
        return heads + self.bias

    @torch.no_grad()
    def transition_eigenvalues(self, x: Tensor, state: SLSTMState | None = None) -> Tensor:
        """(B, T, H, D): the forget gates, which multiply the cell c when h_{t-1} is held fixed."""
        gates = self._gates(x, self._convolved(x, state)[0])
        cell = None if state is None else state.cell
        h, _ = slstm(gates, self.recurrent, initial_state=cell)
        first = torch.zeros_like(h[:, :1]) if cell is None else cell.h[:, None].to(h.dtype)
        before = torch.cat([first, h[:, :-1]], dim=1)
        R_f = self.recurrent.unflatten(-1, (4, -1))[..., 1, :]
        return torch.sigmoid(gates[..., 1, :] + torch.einsum("bthd,hdg->bthg", before, R_f))
