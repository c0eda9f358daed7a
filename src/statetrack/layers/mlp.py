"""The MLPs of the backbone: gated, without biases."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.layers.fusion import joined_product, joins, recomputes
from statetrack.layers.headwise import round_up
from statetrack.layers.initialisation import small_init, wang_init
from statetrack.ops.geglu import geglu
from statetrack.ops.swiglu import swiglu, swiglu_product


class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) * W_up x)."""

    def __init__(self, d_model: int, ratio: float, layers: int):
        super().__init__()
        width = round(ratio * d_model)
        self.gate = nn.Linear(d_model, width, bias=False)
        self.up = nn.Linear(d_model, width, bias=False)
        self.down = nn.Linear(width, d_model, bias=False)
        for linear in (self.gate, self.up, self.down):
            nn.init.normal_(linear.weight, std=0.02)
        with torch.no_grad():
            self.down.weight /= math.sqrt(2 * layers)

    def forward(self, x: Tensor) -> Tensor:
        # gate and up must be equal halves of the joined product, so it cannot have padded columns
        if joins(x, self.gate, self.up) and self.gate.out_features % 4 == 0:
            gate_up = joined_product(x, (self.gate, self.up))
            if recomputes(x) and joins(gate_up, self.down):
                return swiglu_product(gate_up, self.down.weight)
            return self.down(swiglu(gate_up))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GeGLU(nn.Module):
    """W_down (gelu(W_gate x) * W_up x), with the width and the initialisation of the xlstm package."""

    def __init__(self, d_model: int, ratio: float, layers: int):
        super().__init__()
        width = round_up(ratio * d_model)
        self.gate = nn.Linear(d_model, width, bias=False)
        self.up = nn.Linear(d_model, width, bias=False)
        self.down = nn.Linear(width, d_model, bias=False)
        small_init(self.gate.weight, d_model)
        small_init(self.up.weight, d_model)
        wang_init(self.down.weight, d_model, layers)

    def forward(self, x: Tensor) -> Tensor:
        # as in SwiGLU: equal halves, no padded columns
        if joins(x, self.gate, self.up) and self.gate.out_features % 4 == 0:
            return self.down(geglu(joined_product(x, (self.gate, self.up))))
        return self.down(F.gelu(self.gate(x)) * self.up(x))


MLPS = {"swiglu": SwiGLU, "geglu": GeGLU}
