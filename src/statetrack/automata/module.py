"""A compiled network as an nn.Module on the library's own delta rule, in DeltaProduct form."""

import math
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn

from statetrack.automata.actions import EPS, Permutation, Reset
from statetrack.automata.layer import Layer
from statetrack.automata.tables import LevelTables
from statetrack.errors import UserError, unknown_name
from statetrack.ops.delta_rule import delta_rule

if TYPE_CHECKING:
    from statetrack.automata.compiler import CompiledLRNN

SEGMENT_NUMBERS = 1 << 23  # entries of the key tensor per segment; about 32 MB in float32
NEVER = -1e4  # logit of a state that the context rules out


class CompiledLevel(nn.Module):
    """One layer: a table of delta-rule steps per action, and queries that read the state back.

    The state of Eq. 1 is the vector h, here S (K = n, V = 1). The op reads one number S^T q per head, so a
    one-hot layer has ceil(log2 n) heads with equal keys whose queries are the binary digits of the index,
    and other layers have one head per coordinate. dec is a linear map of those readings.
    """

    action_of: Tensor
    labels: Tensor
    reset_to: Tensor
    inverse: Tensor

    def __init__(self, tables: LevelTables, keys: str, dtype: torch.dtype):
        super().__init__()
        layer = tables.layer
        self.size, self.reads = layer.size, layer.reads
        k, beta, v = _step_tables(layer, keys)
        queries, weight, bias = _readout(layer)
        self.keys, self.betas, self.values = (
            nn.Parameter(torch.tensor(x, dtype=dtype)) for x in (k, beta, v)
        )
        self.H0, self.queries = (nn.Parameter(torch.tensor(x, dtype=dtype)) for x in (layer.H0, queries))
        self.weight, self.bias = (nn.Parameter(torch.tensor(x, dtype=dtype)) for x in (weight, bias))
        self.register_buffer("action_of", torch.tensor(tables.action_of))
        self.register_buffer("labels", torch.tensor(layer.labels))
        targets = [a.target if isinstance(a, Reset) else -1 for a in layer.actions]
        self.register_buffer("reset_to", torch.tensor(targets))
        identity = tuple(range(layer.size))
        inverses = [a.inverse() if isinstance(a, Permutation) else identity for a in layer.actions]
        self.register_buffer("inverse", torch.tensor(inverses))

    @property
    def householders(self) -> int:
        """Delta-rule steps per token."""
        return self.keys.shape[1]

    def start(self, batch: int) -> Tensor:
        """The state before the first token, (B, heads, K, 1)."""
        return self.H0[:, None].expand(batch, len(self.queries), -1, -1)

    def forward(self, symbols: Tensor, state: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        """Symbols (B, T) -> readings (B, T, heads) and the state to carry on from."""
        B, T = symbols.shape
        action, heads = self.action_of[symbols], len(self.queries)
        k = self.keys[action].flatten(1, 2)[:, :, None].expand(-1, -1, heads, -1)
        v = self.values[action].flatten(1, 2)[:, :, None, None].expand(-1, -1, heads, -1)
        beta = self.betas[action].flatten(1, 2)[:, :, None].expand(-1, -1, heads)
        o, final = delta_rule(
            self.queries.expand(B, T, -1, -1),
            k,
            v,
            beta,
            householders=self.householders,
            scale=1.0,
            initial_state=state,
            output_final_state=True,
            backend=backend,
        )
        assert final is not None  # asked for above
        return o.squeeze(-1), final

    def scores(self, readings: Tensor) -> Tensor:
        """The linear part of dec: one score per row of the codebook, (B, T, G)."""
        return readings @ self.weight.T + self.bias

    def read(self, readings: Tensor, symbols: Tensor) -> Tensor:
        """The level's current or previous state, (B, T); see `Layer`."""
        row = self.scores(readings).argmax(-1)
        if self.reads == "current":
            return self.labels[row]
        action = self.action_of[symbols]
        target = self.reset_to[action]
        # After a reset h = e_target + eps h_old, and readings are linear in h.
        old = (readings - self.queries.T[target.clamp(min=0)]) / EPS
        return torch.where(target >= 0, self.scores(old).argmax(-1), self.inverse[action, row])


class CompiledModule(nn.Module):
    """Token ids (B, T), indices into the alphabet -> logits over the automaton's states (B, T, |Q|).

    All tables are parameters. Between layers the reading is an index into integer tables, so gradients of
    the logits reach the last layer only; `levels_of` gives the scores of every level, to train the others.
    `keys="exact"` stores a swap as k = e_i - e_j with beta = 1, exact at any length; `keys="unit"` as
    (e_i - e_j) / sqrt 2 with beta = 2, which has the unit norm of a trained layer (and passes the checked
    mode of the op).
    """

    constant: Tensor
    accepting: Tensor

    def __init__(self, compiled: "CompiledLRNN", *, backend: str = "auto", keys: str = "exact"):
        super().__init__()
        if keys not in ("exact", "unit"):
            raise unknown_name("to_module: keys", keys, ("exact", "unit"))
        self.backend, self.n_states = backend, compiled.dfa.n_states
        dtype = getattr(torch, compiled.dtype)
        self.n_letters = len(compiled.dfa.alphabet)
        self.levels = nn.ModuleList()
        for i, tables in enumerate(compiled.tables()):
            self.levels.append(CompiledLevel(tables, keys, dtype))
            self.register_buffer(f"table{i}", torch.tensor(tables.table))
        constant = torch.full((self.n_states,), NEVER, dtype=dtype)
        constant[compiled.dfa.start] = 0
        self.register_buffer("constant", constant)
        accepting = torch.zeros(self.n_states, dtype=torch.bool)
        accepting[sorted(compiled.dfa.accepting)] = True
        self.register_buffer("accepting", accepting)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits over the states after every token."""
        if not len(self.levels):
            self._check(tokens)
            return self.constant.expand(*tokens.shape, -1)
        parts = [self._logits(readings[-1], symbols[-1]) for readings, symbols in self._segments(tokens)]
        return torch.cat(parts, dim=1) if parts else self.constant.new_zeros(*tokens.shape, self.n_states)

    @torch.no_grad()
    def states(self, tokens: Tensor) -> Tensor:
        """The states after every token, (B, T), a segment at a time so that long words fit in memory."""
        if not len(self.levels):
            return self.forward(tokens).argmax(-1)
        parts = [self._logits(r[-1], s[-1]).argmax(-1) for r, s in self._segments(tokens)]
        return torch.cat(parts, dim=1) if parts else tokens

    def accepts(self, tokens: Tensor) -> Tensor:
        """Whether each word is accepted, (B,)."""
        if not tokens.shape[1]:
            return self.accepting[self.constant.argmax()].expand(len(tokens))
        return self.accepting[self.states(tokens)[:, -1]]

    def levels_of(self, tokens: Tensor) -> list[Tensor]:
        """Every level's scores of its own current state, each (B, T, n)."""
        segments = [readings for readings, _ in self._segments(tokens)]
        return [
            level.scores(torch.cat(parts, dim=1))
            for level, parts in zip(self._levels(), zip(*segments, strict=True), strict=True)
        ]

    def _levels(self) -> list[CompiledLevel]:
        return cast(list[CompiledLevel], list(self.levels))

    def _check(self, tokens: Tensor) -> None:
        if tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise UserError(
                f"CompiledModule: tokens has shape {tuple(tokens.shape)} and dtype {tokens.dtype}, expected "
                f"whole numbers of shape (batch, time)."
            )
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.n_letters:
            raise UserError(
                f"CompiledModule: a token is outside 0 to {self.n_letters - 1}, the places in the alphabet."
            )

    def _segments(self, tokens: Tensor):
        """Run all levels over consecutive segments of time; yields the readings and symbols of each level."""
        self._check(tokens)
        B, T = tokens.shape
        levels = self._levels()
        states = [level.start(B) for level in levels]
        width = max(level.keys[0].numel() * len(level.queries) for level in levels)
        length = max(64, SEGMENT_NUMBERS // max(1, B * width))
        for begin in range(0, T, length):
            symbols, readings = [tokens[:, begin : begin + length].long()], []
            for i, level in enumerate(levels):
                o, states[i] = level(symbols[i], states[i], self.backend)
                readings.append(o)
                if i + 1 < len(levels):
                    symbols.append(getattr(self, f"table{i}")[symbols[i], level.read(o, symbols[i])])
            yield readings, symbols

    def _logits(self, readings: Tensor, symbols: Tensor) -> Tensor:
        level, table = self._levels()[-1], getattr(self, f"table{len(self.levels) - 1}")
        scores = level.scores(readings)
        # Impossible readings go to an extra column, which is dropped.
        where = table[symbols] if table.shape[0] > 1 else table[0].expand_as(scores)
        logits = scores.new_full((*scores.shape[:-1], self.n_states + 1), NEVER)
        return logits.scatter_reduce(-1, where, scores, "amax")[..., :-1]


def _step_tables(layer: Layer, keys: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys (actions, m, n), betas and values (actions, m) in temporal order; padding steps have beta 0."""
    all_factors = [[f.unit() if keys == "unit" else f for f in a.factors()] for a in layer.actions]
    m = max(1, *map(len, all_factors))
    k = np.zeros((len(all_factors), m, layer.size))
    beta, v = np.zeros(k.shape[:2]), np.zeros(k.shape[:2])
    k[:, :, 0] = 1.0
    for i, factors in enumerate(all_factors):
        # The rightmost factor of the product is applied first.
        for j, f in enumerate(reversed(factors)):
            k[i, j], beta[i, j], v[i, j] = f.key, f.beta, f.value
    return k, beta, v


def _readout(layer: Layer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries (heads, n), and the linear decoder (codebook rows, heads) with its bias."""
    if not layer.one_hot:
        return np.eye(layer.size), layer.codebook, layer.bias
    digits = max(1, math.ceil(math.log2(layer.size)))
    code = (np.arange(layer.size)[:, None] >> np.arange(digits)) & 1
    signs = 2.0 * code - 1
    return code.T.astype(float), signs, -signs.sum(axis=1) / 2
