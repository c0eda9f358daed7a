"""What a trained one-layer DeltaNet does on each token of a word problem, read from its weights."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.layers import Model
from statetrack.layers.deltanet import DeltaNet
from statetrack.layers.norm import normalise_sum
from statetrack.ops.delta_rule.reference import l2_normalise
from statetrack.spec import RunSpec
from statetrack.tasks import WordProblem
from statetrack.tasks.groups import Group, group


@dataclass(frozen=True)
class Learned:
    """The affine maps S -> A_x S + B_x of every input token x, and the state after the start token.

    Without a convolution they depend on the token alone. All in float64; m tokens, H heads.
    """

    tokens: np.ndarray  # (m,): the elements that the task draws
    inputs: Tensor  # (m + 1, d_model): what the mixer reads, the start token last
    keys: np.ndarray  # (m, n, H, K), of norm 1
    betas: np.ndarray  # (m, n, H)
    transitions: np.ndarray  # (H, m, K, K)
    offsets: np.ndarray  # (H, m, K, V)
    start: np.ndarray  # (H, K, V)


def problem_of(spec: RunSpec) -> tuple[WordProblem, Group]:
    """The run's task and group, or why it cannot be snapped."""
    problem = spec.task
    if not isinstance(problem, WordProblem):
        raise UserError(f"snap: the task is {type(problem).__name__}, expected a group word problem.")
    found = group(problem.group)
    if found.name[0] not in "SAZ" or found.order < 2:
        raise UserError(
            f"snap: the group is {problem.group}, expected S_n, A_n or Z_m: snap knows an exact form of "
            "permutations of items and of rotations only."
        )
    if problem.tokens_per_element != 1:
        raise UserError(
            f"snap: tokens_per_element is {problem.tokens_per_element}, expected 1: with fillers an "
            "element's transition is spread over several tokens."
        )
    return problem, found


def mixer_of(model: Model) -> DeltaNet:
    """The one DeltaNet of the model, or why its transitions are not those of single tokens."""
    config = model.config
    if config.layers != 1:
        raise UserError(
            f"snap: the model has {config.layers} layers, expected 1: what a later layer does at a token "
            "depends on all tokens before it, so there is no transition of a token to round."
        )
    mixer = model.get_submodule("blocks.0.mixer")
    if not isinstance(mixer, DeltaNet):
        raise UserError(
            f"snap: the mixer is {type(mixer).__name__}, expected DeltaNet or DeltaProduct, whose "
            "transitions are products of reflections."
        )
    c = mixer.config
    if c.eigenvalues != "[-1,1]":
        raise UserError(
            f"snap: the eigenvalues are in {c.eigenvalues}, expected [-1,1]: a reflection has the eigenvalue "
            "-1 (beta = 2), which this range does not have."
        )
    if c.convolution:
        raise UserError(
            f"snap: the layer has a convolution of width {c.convolution}, expected none: with it a "
            "transition depends on the tokens before. Train with --convolution 0."
        )
    if c.gated:
        raise UserError(
            "snap: the layer is gated, expected DeltaNet without a gate: its decay shrinks the state at "
            "every token."
        )
    if c.qk_activation != "identity":
        raise UserError(
            f"snap: qk_activation is {c.qk_activation!r}, expected 'identity': after it a key has no large "
            "negative entries, so most directions cannot be set. Train with --qk-activation identity."
        )
    if mixer.shared_by > 1:
        raise UserError(
            f"snap: the layer has {mixer.value_heads} value heads for {mixer.heads} key heads, expected as "
            "many of each: reflections of heads that share their keys cannot be set one by one."
        )
    return mixer


@torch.no_grad()
def read(model: Model, mixer: DeltaNet, tokens: np.ndarray, bos: int) -> Learned:
    """Run the layer's projections on every input token and on the start token."""
    all_tokens = torch.tensor([[*tokens.tolist(), bos]])
    normal = normalise_sum(model.get_submodule("blocks.0.mixer_norm"), model._embed(all_tokens), None)[1]
    _, k, v, beta, _, _ = mixer._controls(normal, None)
    n, H, m = mixer.config.householders, mixer.heads, len(tokens)
    k = l2_normalise(k.double()).reshape(m + 1, n, H, mixer.K).numpy()
    v = v.double().reshape(m + 1, n, H, mixer.V).numpy()
    beta = beta.double().reshape(m + 1, n, H).numpy()
    A = np.broadcast_to(np.eye(mixer.K), (m + 1, H, mixer.K, mixer.K))
    B = np.zeros((m + 1, H, mixer.K, mixer.V))
    for j in range(n):
        step = beta[:, j, :, None] * k[:, j]
        A = A - step[..., None] * np.einsum("xhk,xhkl->xhl", k[:, j], A)[:, :, None]
        B = B - step[..., None] * (np.einsum("xhk,xhkv->xhv", k[:, j], B) - v[:, j])[:, :, None]
    A, B = A.swapaxes(0, 1), B.swapaxes(0, 1)
    # the state before the start token is 0
    return Learned(tokens, normal[0].double(), k[:m], beta[:m], A[:, :m], B[:, :m], B[:, m])
