"""A model trained with eigenvalues in [0,1], opened in [-1,1] to go on training.

Both extensions of Table 2 (tab:eigenvalue_range) put 2 a - 1 in the place of an eigenvalue a in [0,1]:

    DeltaNet    1 - beta, beta = sigmoid(z)      becomes    1 - 2 sigmoid(z)      (KDA too)
    Mamba       exp(delta A)                     becomes    2 exp(delta A) - 1    (Mamba-2 and Mamba-3 too)

So with the same weights the distance to 1 doubles: what was kept (1) is kept, what faded by a tenth (0.9)
fades by a fifth (0.8), what was forgotten in one step (0) now flips its sign (-1), and DeltaNet writes twice
as much. The loss of a trained model rises. To compute the same function, the weights would have to halve the
distance first, sigmoid(z') = sigmoid(z) / 2 and exp(delta A') = (1 + exp(delta A)) / 2. No weights do so
exactly: z = W x, but z' is not linear in z; and A' would have to depend on delta. `extended_range` finds
those that do so best on given tokens. The paper trains both ranges from scratch and does not extend models.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.errors import UserError, unknown_name
from statetrack.layers.deltanet import DeltaNet
from statetrack.layers.kda import KDA
from statetrack.layers.mamba import Mamba
from statetrack.layers.mamba2 import Mamba2
from statetrack.layers.mamba3 import Mamba3, inverse_heavy_tail
from statetrack.layers.model import Model
from statetrack.layers.precision import at_least_float32
from statetrack.layers.presets import with_mixer_options

KEEP = ("weights", "function")
RIDGE = 1e-4  # weight of the squared distance to the old weights, for directions that the tokens do not have
MAX_STEPS = 100  # of L-BFGS


def extended_range(
    model: Model, keep: Literal["weights", "function"] = "weights", tokens: Tensor | None = None
) -> Model:
    """A copy of a model in [0,1] whose mixers have eigenvalues in [-1,1], to go on training.

        extended = extended_range(model)                           the same weights, another function
        extended = extended_range(model, "function", tokens)       nearly the same function

    "weights" keeps all weights, and every eigenvalue a becomes 2 a - 1. "function" changes those behind the
    eigenvalues so that they stay as they were on `tokens` (B, T), as nearly as weights allow: DeltaNet's
    `to_beta` is fitted to half of each beta (a convex problem), Mamba's A is chosen such that every
    eigenvalue is kept at the mean step size of its channel (Mamba-2: of its head), and Mamba-3's map to A is
    fitted by least squares. Use some thousand tokens of the training data.
    """
    if keep not in KEEP:
        raise unknown_name("extended_range: keep", keep, KEEP)
    if keep == "function" and (tokens is None or tokens.numel() == 0):
        raise UserError(
            'extended_range: keep is "function" without tokens, expected some (B, T) of the data.'
        )
    narrow = [i for i in range(model.config.layers) if _range_of(model.config.mixer_of(i)) == "[0,1]"]
    if not narrow:
        raise UserError(
            "extended_range: no mixer of the model has eigenvalues in [0,1], so there is nothing to extend."
        )
    config = with_mixer_options("extended_range", model.config, {"eigenvalues": "[-1,1]"})
    table = model.embedding.weight
    extended = Model(config, len(table), model.head.out_features).to(table.device, table.dtype)
    extended.load_state_dict(dict(model.state_dict()))  # without the range that goes with it
    if keep == "function":
        assert tokens is not None
        inputs = _inputs_of_mixers(model, tokens)
        for i in narrow:
            mixer = extended.get_submodule(f"blocks.{i}.mixer")
            _refit(mixer)(mixer, inputs[i])
    return extended


def _range_of(mixer: Any) -> str | None:
    return getattr(mixer, "eigenvalues", None)


@torch.no_grad()
def _inputs_of_mixers(model: Model, tokens: Tensor) -> list[Tensor]:
    """What every layer's mixer reads on these tokens, (B, T, d_model)."""
    inputs: list[Tensor] = []
    mixers = [model.get_submodule(f"blocks.{i}.mixer") for i in range(model.config.layers)]
    hooks = [mixer.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for mixer in mixers]
    try:
        model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


def _refit(mixer: nn.Module) -> Callable[[Any, Tensor], None]:
    config: Any = getattr(mixer, "config", None)
    # the gates of a DeltaNet and of KDA stay as they are, unless they get a sign
    refused = {"beta": "hard", "gate": "hard"} if isinstance(mixer, Mamba2 | Mamba3) else {"beta": "hard"}
    for name, value in (refused | {"signed_gate": True}).items():
        if getattr(config, name, None) == value:
            raise UserError(
                f"extended_range: a {type(mixer).__name__} with {name}={value!r} cannot keep its function, "
                f'expected another {name}. Use keep="weights".'
            )
    if isinstance(mixer, DeltaNet | KDA):
        return _halve_beta
    if isinstance(mixer, Mamba | Mamba2):
        return _halve_distance
    if isinstance(mixer, Mamba3):
        return _halve_distances
    raise UserError(
        f"extended_range: {type(mixer).__name__} cannot keep its function, expected DeltaNet, KDA, a Mamba. "
        'Use keep="weights".'
    )


def _halve_beta(mixer: DeltaNet | KDA, x: Tensor) -> None:
    """Weights W' of the betas with sigmoid(W' x) near sigmoid(W x) / 2, in cross-entropy, on x (B, T, D)."""
    x, old = at_least_float32(x).flatten(0, 1), at_least_float32(mixer.to_beta.weight.detach())
    target = torch.sigmoid(x @ old.T) / 2
    new = old.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([new], max_iter=MAX_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(x @ new.T, target)
        value = value + RIDGE * (new - old).square().mean()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[arg-type]
    with torch.no_grad():
        mixer.to_beta.weight.copy_(new)


@torch.no_grad()
def _halve_distance(mixer: Mamba | Mamba2, x: Tensor) -> None:
    """A' with 2 exp(d A') - 1 = exp(d A) at the mean step size d of each channel or head on x (B, T, D)."""
    if isinstance(mixer, Mamba2):
        *_, steps, _ = mixer._controls(x, None)
        step = steps.mean((0, 1))
    else:
        _, _, delta, bias, *_ = mixer._controls(x, None)  # delta (B, D, T) before the softplus
        delta = at_least_float32(delta) if bias is None else at_least_float32(delta) + bias[:, None]
        step = F.softplus(delta).mean((0, 2))[:, None]
    mixer.A_log.copy_(_half_as_far(step, at_least_float32(mixer.A_log).exp()).log())


@torch.no_grad()
def _halve_distances(mixer: Mamba3, x: Tensor) -> None:
    """A map to A' with 2 exp(d A') - 1 near exp(d A), for the d and A of every token of x (B, T, D)."""
    x = at_least_float32(x).flatten(0, 1)
    start = sum(mixer.parts[:5])
    rows = mixer.in_proj.weight[start : start + mixer.heads]
    old = at_least_float32(rows)
    step, rate = mixer.steps_and_rates(x[None])
    target = inverse_heavy_tail(_half_as_far(step, rate)[0]) - x @ old.T
    # least squares; with RIDGE the weights stay where no token says anything
    gram = x.T @ x / len(x) + RIDGE * torch.eye(x.shape[1], device=x.device, dtype=x.dtype)
    rows.copy_(old + torch.linalg.solve(gram, x.T @ target / len(x)).T)


def _half_as_far(step: Tensor, rate: Tensor) -> Tensor:
    """The rate r' with 2 exp(-step r') - 1 = exp(-step r)."""
    return -torch.log1p(torch.expm1(-step * rate) / 2) / step
