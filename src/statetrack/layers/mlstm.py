"""The mLSTM block of xLSTM (Beck et al. 2024): a linear RNN with one forget gate per head, of either sign."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.config import added
from statetrack.errors import UserError, unknown_name
from statetrack.layers.block_diagonal import dense_products, may_be_dense
from statetrack.layers.checks import check_sizes, divide
from statetrack.layers.convolution import ShortConvolution
from statetrack.layers.fusion import fuses, joined_product, may_read
from statetrack.layers.hard_gates import check_gate, chosen_gates, gate_values, hard_logits, shown_hard
from statetrack.layers.headwise import HeadNorm, HeadwiseLinear, gated_heads, round_up
from statetrack.layers.initialisation import opposite_rows, small_init, wang_init
from statetrack.layers.mixer import Mixer, Packing, offsets, returns_states
from statetrack.layers.padding import run_padded
from statetrack.layers.precision import at_least_float32
from statetrack.ops.checks import check_eigenvalues
from statetrack.ops.gated_linear_attention import gated_linear_attention
from statetrack.ops.mlstm import MLSTMCell, mlstm_joined

BIASES = ("linspace", "standard")


@dataclass(frozen=True)
class MLSTMConfig:
    """mLSTM, without a separate MLP: `proj_factor` widens the block itself."""

    heads: int = 4  # number of heads, each with a memory of its own
    proj_factor: float = 2.0  # width of the block over d_model
    convolution: int = 4  # width of the short convolution in front of q and k
    qkv_block: int = 4  # q, k and v are projected in blocks of this many channels
    # initial biases of the gates. linspace: forget gate from 3 to 6 across the heads, input gate N(0, 0.1^2);
    # standard: those of nn.Linear, as the paper has them for modular arithmetic (App. E.1)
    bias_init: Literal["linspace", "standard"] = "linspace"
    eigenvalues: Literal["[0,1]", "[-1,1]"] = added(
        "[0,1]"
    )  # of the forget gate: sigmoid(f), 2 sigmoid(f) - 1
    # whether n divides the output. Without it the input gate is a sigmoid and no exp (Beck et al. 2025)
    normaliser: bool = added(True)
    gate: Literal["smooth", "hard"] = added("smooth")  # "hard": forget gates reach their bounds

    def build(self, d_model: int, layers: int) -> "MLSTM":
        return MLSTM(self, d_model, layers)


class MLSTMState(NamedTuple):
    cell: MLSTMCell  # C (B, H, K, K), n (B, H, K), m (B, H), float32
    convolution: Tensor  # (B, width, 3)


class MLSTMSigmoidState(NamedTuple):
    """Without the normaliser."""

    S: Tensor  # (B, H, K, K), float32
    convolution: Tensor  # (B, width, 3)


class MLSTM(Mixer):
    """C_t = f_t C_{t-1} + i_t k_t v_t^T,  h_t = C_t^T q_t / max(|n_t . q_t|, 1), f = sigmoid, i = exp.

        u, z = W_up x        c = silu(conv(u))        q, k = W_q c, W_k c        v = W_v u
        y = W_down ((norm(h) + skip c) silu(z))

    i and f are linear in (q, k, v). Forward and initialisation are those of the xlstm package. Shapes: x, y
    (B, T, d_model); the state C (B, H, K, K), n (B, H, K), m (B, H) in float32, K = proj_factor d_model / H.
    The transition is f_t times the identity, f_t in (0, 1): no negative eigenvalues. Returns y and the state
    to go on from.

    With `eigenvalues` "[-1,1]" the gate is 2 sigmoid - 1, in (-1, 1), in C and n alike. Their sums then have
    signs and can cancel: |n . q| may fall below 1, where h stops being a mean of the values, and the sign of
    C^T q is kept, as |n . q| divides it (docs/gates.md). `normaliser=False` has none of this: h = C^T q and
    i = sigmoid, so that nothing can overflow (mLSTMsig, Beck et al. 2025); the norm after it sets the scale.

    >>> layer = MLSTM(MLSTMConfig(heads=4), d_model=64)
    >>> y, state = layer(torch.randn(2, 16, 64))                     # B, T, d_model
    >>> y.shape, state.cell.C.shape
    (torch.Size([2, 16, 64]), torch.Size([2, 4, 32, 32]))
    """

    packs = True
    packs_by_padding = True

    def __init__(self, config: MLSTMConfig, d_model: int, layers: int = 1):
        super().__init__()
        if config.bias_init not in BIASES:
            raise unknown_name("MLSTM: bias_init", config.bias_init, BIASES)
        check_eigenvalues("MLSTM", config.eigenvalues)
        check_gate("MLSTM", config.gate)
        sizes = {"heads": config.heads, "qkv_block": config.qkv_block, "convolution": config.convolution}
        check_sizes("MLSTM", **sizes)
        if not (config.proj_factor > 0 and math.isfinite(config.proj_factor)):
            raise UserError(f"MLSTM: proj_factor is {config.proj_factor}, expected a number above 0.")
        self.config, self.heads = config, config.heads
        width = round_up(config.proj_factor * d_model)
        K = divide("MLSTM", width, config.heads, "heads")
        blocks = divide("MLSTM", width, config.qkv_block, "qkv_block")
        self.to_up = nn.Linear(d_model, 2 * width, bias=False)
        self.convolution = ShortConvolution(width, config.convolution, bias=True)
        self.to_q, self.to_k, self.to_v = (HeadwiseLinear(width, blocks) for _ in range(3))
        self.to_i = nn.Linear(3 * width, config.heads)
        self.to_f = nn.Linear(3 * width, config.heads)
        self.norm = HeadNorm(config.heads, K)
        self.skip = nn.Parameter(torch.ones(width))
        self.to_out = nn.Linear(width, d_model, bias=False)
        for linear in (self.to_up, self.to_q, self.to_k, self.to_v):
            small_init(linear.weight, d_model)
        wang_init(self.to_out.weight, d_model, layers)
        self._initialise_gates()

    @torch.no_grad()
    def _initialise_gates(self) -> None:
        """As in the xlstm package; gates that may have a sign start in the middle and depend on the input."""
        signed = self.config.eigenvalues == "[-1,1]"
        nn.init.zeros_(self.to_i.weight)
        nn.init.zeros_(self.to_f.weight)
        if self.config.bias_init == "linspace":
            nn.init.normal_(self.to_i.bias, std=0.1)
            ends = (-1, 1) if signed else (3, 6)
            self.to_f.bias.copy_(torch.linspace(*ends, self.heads))
        if signed:
            # q, k and v have a variance of about 1 / width: logits of order 1
            nn.init.normal_(self.to_f.weight)
            opposite_rows(self.to_f.weight, factor=1.0)

    def forward(
        self,
        x: Tensor,
        state: MLSTMState | MLSTMSigmoidState | None = None,
        *,
        packing: Packing | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, MLSTMState | MLSTMSigmoidState | None]:
        if attention_mask is not None:
            return run_padded("MLSTM", self, x, attention_mask, state, packing)
        u, z = self.to_up(x).chunk(2, dim=-1)
        past = None if state is None else state.convolution
        c, convolution = self.convolution(u, past, silu=True, packing=packing)
        qkv, i, f = self._controls(u, c)
        if self.config.normaliser:
            assert isinstance(state, MLSTMState | None)
            cell = None if state is None else state.cell
            signed = self.config.eigenvalues == "[-1,1]"
            f = hard_logits(f, signed) if self.config.gate == "hard" else f
            h, cell = mlstm_joined(qkv, i, f, signed=signed, initial_state=cell, **offsets(packing))
            after = None if convolution is None else MLSTMState(cell, convolution)
        else:
            assert isinstance(state, MLSTMSigmoidState | None)
            gates = self._gates(f)
            q, k, v = qkv.unbind(2)
            h, S = gated_linear_attention(
                q,
                (torch.sigmoid(i) * k.shape[-1] ** -0.5)[..., None] * k,
                v,
                g=gates.get("g"),
                a=gates.get("a"),
                scale=1.0,
                initial_state=None if state is None else state.S,
                output_final_state=returns_states(packing),
                **offsets(packing),
            )
            after = None if S is None or convolution is None else MLSTMSigmoidState(S, convolution)
        return self.to_out(gated_heads(self.norm, h, self.skip, c, z, x.dtype)), after

    def _gates(self, f: Tensor) -> dict[str, Tensor]:
        """The forget gates (B, T, H) by their logarithm or, where they have a sign, by their value."""
        gates = {"g": F.logsigmoid(f)} if self.config.eigenvalues == "[0,1]" else {"a": torch.tanh(f / 2)}
        return chosen_gates(self.config.gate, gates)

    def _controls(self, u: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v (B, T, 3, H, K) and the logits of i and f (B, T, H) from u and c = silu(conv(u))."""
        if may_be_dense(u, self.to_q, self.to_k, self.to_v):
            qkv = dense_products((c, u), ((self.to_q, self.to_k), (self.to_v,)))
        else:
            qkv = torch.cat([self.to_q(c), self.to_k(c), self.to_v(u)], dim=-1)
        if fuses(u) and may_read(nn.Linear, self.to_i, self.to_f):
            logits = at_least_float32(joined_product(qkv, (self.to_i, self.to_f)))
            i = logits[..., : self.heads] + self.to_i.bias
            f = logits[..., self.heads : 2 * self.heads] + self.to_f.bias
        else:
            i, f = at_least_float32(self.to_i(qkv)), at_least_float32(self.to_f(qkv))
        return qkv.unflatten(-1, (3, self.heads, -1)), i, f

    def extra_repr(self) -> str:
        """The eigenvalue range, the heads, and whether there is a normaliser."""
        normaliser = f"normaliser={self.config.normaliser}"
        shown = f"eigenvalues={self.config.eigenvalues}, heads={self.heads}, {normaliser}"
        return shown + shown_hard(self.config)

    @torch.no_grad()
    def transition_eigenvalues(
        self, x: Tensor, state: MLSTMState | MLSTMSigmoidState | None = None
    ) -> Tensor:
        """(B, T, H, K): the transition is the forget gate times the identity."""
        u = self.to_up(x).chunk(2, dim=-1)[0]
        c, _ = self.convolution(u, None if state is None else state.convolution, silu=True)
        qkv, _, f = self._controls(u, c)
        a = gate_values(self._gates(f))
        return a[..., None].expand(qkv[:, :, 0].shape)
