"""Gates that reach their bounds: with `gate="hard"` a mixer can keep, flip or turn a state exactly.

Gates are stretched and cut off. Their gradients are those without the cut (a straight-through estimate): most
gates start near 1, where the cut would have no gradient, and they would never learn to forget. Angles and
rates start within their bounds; once there they stay, without a gradient. With one, parity is learned less
well: angles that are right at 0 are moved on.
"""

import math
from typing import Any

import torch
from torch import Tensor

from statetrack.errors import unknown_name

GATES = ("smooth", "hard")

# A gate s in (0, 1) becomes min((1 + m) s, 1), which is 1 above s = 0.909; a gate a in (-1, 1) becomes
# clamp((1 + 2 m) a, -1, 1). Ten times the margin of hard betas, since exp(-Delta |A|) comes near to 1 only
# slowly.
MARGIN = 0.1
# Of turns t, an angle over pi: 0 for |t| below 0.19, a half turn above 0.81.
TURN_MARGIN = 0.3
# Of the rates |A| of gates exp(-Delta |A|) beside turns by Delta: there a half turn needs a Delta near 1.
RATE_MARGIN = 0.5
_LEAST = 2.0**-24  # of a gate given by its logit; 1 - 2^-24 is the largest float32 below 1


def check_gate(mixer: str, kind: str) -> None:
    """Refuse a name that is none of `GATES`."""
    if kind not in GATES:
        raise unknown_name(f"{mixer}: gate", kind, GATES)


def chosen_gates(kind: str, gates: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gates as an op takes them, by their logarithm `g` or value `a`; of kind "hard", stretched and cut off.

        exp(g)    min((1 + m) exp(g), 1)            a    clamp((1 + 2 m) a, -1, 1)

    Angles stay as they are.
    """
    if kind == "smooth":
        return gates
    if "g" in gates:
        g = gates["g"] + math.log1p(MARGIN)
        return gates | {"g": _straight_through(g.clamp(max=0), g)}
    a = (1 + 2 * MARGIN) * gates["a"]
    return gates | {"a": _straight_through(a.clamp(-1, 1), a)}


def hard_share(share: Tensor, signed: bool) -> Tensor:
    """s of the hard gate, which is s, or 2 s - 1 if it is `signed`."""
    stretched = (1 + 2 * MARGIN) * share - MARGIN if signed else (1 + MARGIN) * share
    return _straight_through(stretched.clamp(0, 1), stretched)


def hard_turn(turn: Tensor) -> Tensor:
    """sign(t) clamp((1 + 2 m) |t| - m, 0, 1): 0 and half a turn can be exact."""
    size = (1 + 2 * TURN_MARGIN) * turn.abs() - TURN_MARGIN
    return turn.sign() * size.clamp(0, 1)


def hard_rate(rate: Tensor) -> Tensor:
    """max(|A| - m, 0) of rates |A|: up to m the state is kept exactly, whatever the step Delta."""
    return (rate - RATE_MARGIN).clamp(min=0)


def hard_logits(logits: Tensor, signed: bool) -> Tensor:
    """y with sigmoid(y) = `hard_share`(sigmoid(logits)), to 2^-24, for an op that takes logits of gates."""
    share = hard_share(torch.sigmoid(logits), signed)
    share = _straight_through(share.clamp(_LEAST, 1 - _LEAST), share)
    return share.log() - torch.log1p(-share)  # torch.logit: its gradient has wrong strides in torch.compile


def shown_hard(config: Any) -> str:
    """What `extra_repr` adds for a mixer with hard betas or gates."""
    return "".join(f", {name}=hard" for name in ("beta", "gate") if getattr(config, name, None) == "hard")


def gate_values(gates: dict[str, Tensor]) -> Tensor:
    """The gates themselves, from `g` or `a`."""
    return gates["g"].exp() if "g" in gates else gates["a"]


def _straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    """`value`, with the gradient of another tensor; that one adds exactly 0."""
    return value.detach() + (gradient_of - gradient_of.detach())
