"""Two small models of the paper: the full-matrix baseline of Fig. 4 and the diagonal model of Fig. 1."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from statetrack.errors import UserError
from statetrack.layers.checks import check_sizes
from statetrack.layers.mixer import Mixer
from statetrack.layers.padding import run_padded
from statetrack.layers.precision import at_least_float32
from statetrack.ops.checks import check_eigenvalues


@dataclass(frozen=True)
class DenseTransitionConfig:
    """The full-matrix baseline (App. E.2): transitions are unconstrained, and so are their eigenvalues."""

    size: int = 32  # of the state; a transition is (size, size)
    init_scale: float = 0.02  # standard deviation of A - I at the start; our choice, the paper gives none

    def build(self, d_model: int, layers: int) -> "DenseTransition":
        return DenseTransition(self, d_model)


class DenseTransition(Mixer):
    """H_t = A(x_t) H_{t-1}, H_0 = I; y_t = W_out vec(H_t) / max(1, ||H_t||).

    A(x) = I + W x + b: with d_model at least the size of the alphabet, any table of matrices can be learned.
    Shapes: x, y (B, T, d_model); the state H (B, size, size). Eigenvalues are not bounded.

    >>> layer = DenseTransition(DenseTransitionConfig(size=8), d_model=64)
    >>> y, state = layer(torch.randn(2, 16, 64))                     # B, T, d_model
    >>> y.shape, state.shape
    (torch.Size([2, 16, 64]), torch.Size([2, 8, 8]))
    """

    def __init__(self, config: DenseTransitionConfig, d_model: int):
        super().__init__()
        check_sizes("DenseTransition", size=config.size)
        self.size = config.size
        self.to_transition = nn.Linear(d_model, config.size**2)
        self.to_out = nn.Linear(config.size**2, d_model, bias=False)
        # entries of x start at 0.02, the scale of the embedding
        nn.init.normal_(self.to_transition.weight, std=config.init_scale / (0.02 * d_model**0.5))
        nn.init.zeros_(self.to_transition.bias)

    def forward(
        self, x: Tensor, state: Tensor | None = None, *, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if attention_mask is not None:
            return run_padded("DenseTransition", self, x, attention_mask, state)
        A = self._transitions(x)
        if state is not None and state.shape[0] != x.shape[0]:
            raise UserError(
                f"DenseTransition: the state has batch size {state.shape[0]}, expected {x.shape[0]} as x has."
            )
        H = (
            torch.eye(self.size, device=A.device, dtype=A.dtype).expand(x.shape[0], -1, -1)
            if state is None
            else state
        )
        states = []
        for A_t in A.unbind(1):
            H = A_t @ H
            states.append(H)
        flat = torch.stack(states, dim=1).flatten(-2)
        flat = flat / flat.norm(dim=-1, keepdim=True).clamp(min=1.0)
        return self.to_out(flat.to(x.dtype)), H

    def _transitions(self, x: Tensor) -> Tensor:
        change = at_least_float32(self.to_transition(x)).unflatten(-1, (self.size, self.size))
        return change + self._identity(change)

    def _identity(self, like: Tensor) -> Tensor:
        """Made on the device: a copy from the CPU could not be part of a CUDA graph."""
        return torch.eye(self.size, device=like.device, dtype=like.dtype)

    @torch.no_grad()
    def transition_eigenvalues(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        """(B, T, size), complex."""
        return torch.linalg.eigvals(self._transitions(x))


@dataclass(frozen=True)
class DiagonalToyConfig:
    """The diagonal linear RNN of Fig. 1 (fig:parity_motivation): sigmoid for [0,1], tanh for [-1,1]."""

    eigenvalues: Literal["[0,1]", "[-1,1]"] = "[-1,1]"  # range of the eigenvalues: sigmoid or tanh

    def build(self, d_model: int, layers: int) -> "DiagonalToy":
        return DiagonalToy(self, d_model)


class DiagonalToy(Mixer):
    """h_t = a_t h_{t-1} + B x_t, y_t = h_t, with a_t = sigmoid or tanh of 10 (W x_t + b).

    Shapes: x, y and a (B, T, d_model); the state h (B, d_model).

    >>> layer = DiagonalToy(DiagonalToyConfig(eigenvalues="[-1,1]"), d_model=64)
    >>> y, state = layer(torch.randn(2, 16, 64))                     # B, T, d_model
    >>> y.shape, state.shape
    (torch.Size([2, 16, 64]), torch.Size([2, 64]))
    """

    def __init__(self, config: DiagonalToyConfig, d_model: int):
        super().__init__()
        check_eigenvalues("DiagonalToy", config.eigenvalues)
        self.config = config  # its range is saved beside the weights
        self.squash = {"[0,1]": torch.sigmoid, "[-1,1]": torch.tanh}[config.eigenvalues]
        self.to_a = nn.Linear(d_model, d_model)
        self.to_b = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self, x: Tensor, state: Tensor | None = None, *, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if attention_mask is not None:
            return run_padded("DiagonalToy", self, x, attention_mask, state)
        a, b = self._a(x), at_least_float32(self.to_b(x))
        h = torch.zeros_like(b[:, 0]) if state is None else state
        states = []
        for a_t, b_t in zip(a.unbind(1), b.unbind(1)):
            h = torch.addcmul(b_t, a_t, h)
            states.append(h)
        return torch.stack(states, dim=1).to(x.dtype), h

    def extra_repr(self) -> str:
        """The eigenvalue range."""
        return f"eigenvalues={self.config.eigenvalues}"

    def _a(self, x: Tensor) -> Tensor:
        return self.squash(10 * at_least_float32(self.to_a(x)))

    @torch.no_grad()
    def transition_eigenvalues(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        """(B, T, d_model)."""
        return self._a(x)
