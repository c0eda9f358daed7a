"""Round the reflections that a tracker has learned to exact ones, and check what it then answers."""

import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from statetrack.errors import UserError
from statetrack.layers import Model
from statetrack.layers.deltanet import DeltaNet, DeltaNetState
from statetrack.snapping.geometry import (
    Fit,
    Representation,
    fit_isometry,
    fixed_point,
    representations,
    swaps_from_keys,
)
from statetrack.snapping.learned import Learned, mixer_of, problem_of, read
from statetrack.snapping.weights import ExactHead, check_written, fit_values, write
from statetrack.spec import RunSpec
from statetrack.tasks.groups import Group

TOLERANCE = 0.25  # largest misfit of a token; a swap with the right key has it at beta = 1.75
LARGEST_TOLERANCE = 0.7  # different permutations are at least 2^(1/2) apart
MARGIN = 1.0  # smallest lead of the right logit; below it the head is fitted again
SEGMENT = 1000  # tokens per call of the model in `check`


@dataclass(frozen=True)
class HeadReport:
    """What one head has learned, and why it was or was not rounded."""

    head: int
    representation: str  # the nearest of those that snap knows
    misfit: float  # largest over tokens: spectral norm of A_x T - T R_x; permutations are 1.4 or more apart
    refused: str  # why the head is not rounded; "" if it is
    swaps_from_angles: bool | None  # whether the angles of the keys alone give the swaps; None if not swaps


@dataclass(frozen=True)
class ExactStates:
    """The states that a tracker with exact transitions can reach, one for each element of the group."""

    S: Tensor  # (order, H, K, V), by element
    group: Group
    tokens: Tensor  # (m,)
    bos: int

    @property
    def separation(self) -> float:
        """The distance of the two nearest."""
        flat = self.S.flatten(1)
        return float(torch.cdist(flat, flat).fill_diagonal_(torch.inf).min())


@dataclass(frozen=True)
class Check:
    """How a model did on fresh sequences of its task, up to its first wrong answer."""

    length: int
    first_error: int | None  # position of the first wrong answer
    drift: float | None  # largest distance of a last state from the exact one, over half their separation


@dataclass(frozen=True)
class Snapped:
    """The model with exact transitions, and what was found and changed.

    A margin is the lead of the right logit over the best wrong one, the least over every element and every
    last token, on exact states.
    """

    model: Model
    heads: list[HeadReport]
    read_out: str  # "kept" or "fitted again"
    learned_right: float  # share of right answers on exact states with the learned read-out
    commonest: float  # share of the commonest answer among them
    learned_margin: float  # with the learned read-out
    margin: float  # with the one the model has now
    transition_error: float  # largest entry by which written transitions differ from exact ones, in float32
    states: ExactStates


def snap(model: Model, spec: RunSpec, tolerance: float = TOLERANCE) -> Snapped:
    """A copy of a trained one-layer DeltaNet or DeltaProduct with exact permutations or rotations.

        spec, model = load_run("results/3f9c0d5a7b21")
        snap(model, spec).model

    Heads whose transitions are within `tolerance` of permutations of the items (for S_n and A_n) or of
    rotations (for Z_m), and nearest to those of their own elements, are rounded to them, the others are
    silenced. What cannot be rounded is a `UserError` that says why.
    """
    model, heads, states, error = round_transitions(model, spec, tolerance)
    leads, labels = _leads(model, states), _hidden(model, states)[1]
    right, before, read_out = float((leads > 0).float().mean()), float(leads.min()), "kept"
    commonest = labels.bincount().max().item() / len(labels)
    if before < MARGIN:
        _fit_head(model, states)
        leads, read_out = _leads(model, states), "fitted again"
    margin = float(leads.min())
    if margin <= 0:
        silenced = "".join(f" Silenced was head {h.head}: {h.refused}." for h in heads if h.refused)
        raise UserError(
            "snap: the transitions can be rounded, but what the model reads from the exact states does not "
            f"tell all {states.group.order} elements apart (margin {margin:.3g}), also with its head fitted "
            f"again.{silenced} Train longer."
        )
    return Snapped(model, heads, read_out, right, commonest, before, margin, error, states)


def round_transitions(
    model: Model, spec: RunSpec, tolerance: float = TOLERANCE
) -> tuple[Model, list[HeadReport], ExactStates, float]:
    """The first half of `snap`: a copy with exact transitions and the learned read-out.

    Returns it with what was found in each head, the states it can reach, and the error of its transitions.
    """
    if not 0 < tolerance <= LARGEST_TOLERANCE:
        raise UserError(
            f"snap: tolerance is {tolerance:g}, expected above 0 and at most {LARGEST_TOLERANCE}: beyond it "
            "a transition may be as near to another element."
        )
    problem, group = problem_of(spec)
    model = _copy_with_own_head(model).eval()
    mixer = mixer_of(model)
    learned = read(model, mixer, problem.elements, problem.bos)
    heads, exact = _round_heads(learned, mixer, group, tolerance)
    if not exact:
        reasons = "; ".join(f"head {h.head}: {h.refused}" for h in heads)
        raise UserError(
            f"snap: no head has learned the {_noun(group)}s of {problem.group}: {reasons}. Train longer."
        )
    write(mixer, learned, exact)
    error = _transition_error(read(model, mixer, problem.elements, problem.bos), exact)
    check_written(error, learned)
    return model, heads, _exact_states(learned, exact, group, mixer, problem.bos), error


def _copy_with_own_head(model: Model) -> Model:
    """A copy that is not tied: fitting its head again leaves the embedding, and with it the keys, alone."""
    if not model.config.tied:
        return copy.deepcopy(model)
    sizes = model.embedding.num_embeddings, model.head.out_features
    untied = Model(replace(model.config, tied=False), *sizes)
    untied.load_state_dict(model.state_dict() | {"head.weight": model.head.weight})
    return untied


def _round_heads(
    learned: Learned, mixer: DeltaNet, group: Group, tolerance: float
) -> tuple[list[HeadReport], list[ExactHead]]:
    known, heads, exact = representations(group), [], []
    for head in range(mixer.heads):
        A = learned.transitions[head]
        nearest, fit = _best_fit(A, known, learned.tokens)
        vectors = [nearest.reflections(int(x)) for x in learned.tokens]
        most = mixer.config.householders
        refused = _why_not(fit, learned.tokens, vectors, nearest, group, most, tolerance)
        angles = _angles(learned, head, group)
        heads.append(HeadReport(head, nearest.name, float(fit.misfit.max()), refused, angles))
        if not refused:
            T = fit.isometry
            centre = fixed_point(A, learned.offsets[head], T)
            keys, centre = fit_values([v @ T.T for v in vectors], T, centre)
            exact.append(ExactHead(head, nearest, keys, T, centre))
    return heads, exact


def _best_fit(A: np.ndarray, known: list[Representation], tokens: np.ndarray) -> tuple[Representation, Fit]:
    """The representation nearest to the learned transitions, and the fit."""
    fits = [(r, fit_isometry(A, r.matrices[tokens], r.matrices)) for r in known]
    # where two are the same (A_n), the first
    return min(fits, key=lambda pair: round(pair[1].misfit.max(), 6))


def _why_not(
    fit: Fit,
    tokens: np.ndarray,
    vectors: list[np.ndarray],
    nearest: Representation,
    group: Group,
    householders: int,
    tolerance: float,
) -> str:
    """Why a head cannot be rounded, or nothing."""
    worst, longest = int(fit.misfit.argmax()), max(range(len(vectors)), key=lambda x: len(vectors[x]))
    if fit.misfit[worst] > tolerance:
        return (
            f"token {_shown(tokens[worst], group)} is {fit.misfit[worst]:.2f} from its {_noun(group)}, more "
            f"than {tolerance:g}"
        )
    # several elements of Z_m can be the same rotation
    R = nearest.matrices
    if np.any(wrong := ~np.isclose(R[fit.nearest], R[tokens]).all((1, 2))):
        x = int(wrong.argmax())
        return f"token {tokens[x]} is nearer to element {fit.nearest[x]} than to its own"
    if len(vectors[longest]) > householders:
        return (
            f"token {_shown(tokens[longest], group)} needs {len(vectors[longest])} "
            f"reflections, and the layer has {householders} per token"
        )
    return ""


def _noun(group: Group) -> str:
    return "rotation" if group.permutations is None else "permutation"


def _shown(token: int, group: Group) -> str:
    permutations = group.permutations
    return str(token) if permutations is None else f"{token} ({' '.join(map(str, permutations[token]))})"


def _angles(learned: Learned, head: int, group: Group) -> bool | None:
    """Whether the keys' angles give the task's swaps, up to the names of the points, without its labels."""
    if group.permutations is None:
        return None
    permutations = group.permutations[learned.tokens]
    moved = permutations != np.arange(permutations.shape[1])
    swaps = np.flatnonzero(moved.any(1))
    if learned.keys.shape[1] != 1 or np.any(moved[swaps].sum(1) != 2):
        return None
    points = {frozenset(np.flatnonzero(column).tolist()) for column in moved[swaps].T}
    return swaps_from_keys(learned.keys[swaps, 0, head]) == points


def _exact_states(
    learned: Learned, exact: list[ExactHead], group: Group, mixer: DeltaNet, bos: int
) -> ExactStates:
    """T (Z + R_g D) and what the start token wrote beside T, for every element g; 0 in silenced heads."""
    S = np.zeros((group.order, mixer.heads, mixer.K, mixer.V))
    for e in exact:
        T, S0 = e.isometry, learned.start[e.head]
        R = e.representation.matrices
        S[:, e.head] = S0 + T @ (e.centre - T.T @ S0 + R @ (T.T @ S0 - e.centre))
    return ExactStates(torch.from_numpy(S).float(), group, torch.from_numpy(learned.tokens), bos)


def _transition_error(written: Learned, exact: list[ExactHead]) -> float:
    """The largest entry of A_x - product of (I - 2 k k^T) over heads and tokens."""
    largest = 0.0
    for e in exact:
        for A, keys in zip(written.transitions[e.head], e.keys, strict=True):
            P = np.eye(len(A))
            for k in keys:
                P = P - 2 * np.outer(k, k @ P)
            largest = max(largest, float(np.abs(A - P).max()))
    return largest


@torch.no_grad()
def _hidden(model: Model, states: ExactStates) -> tuple[Tensor, Tensor]:
    """What the head reads after every (exact state, token) and after the start token, and the answers."""
    then = torch.from_numpy(states.group.then.astype(np.int64))
    first, _ = model(torch.tensor([[states.bos]]), read_out=False)
    hidden, labels = [first[0]], [torch.tensor([states.bos])]
    for token in states.tokens:
        after, _ = model(token.expand(len(states.S), 1), [DeltaNetState(states.S, None)], read_out=False)
        hidden.append(after[:, 0])
        labels.append(then[:, token])
    return torch.cat(hidden), torch.cat(labels)


def _leads(model: Model, states: ExactStates) -> Tensor:
    """The right logit less the best wrong one, for every row of `_hidden`."""
    hidden, labels = _hidden(model, states)
    logits = model.head(hidden).detach()
    right = logits.gather(1, labels[:, None])
    return (right - logits.scatter(1, labels[:, None], -torch.inf).amax(1, keepdim=True))[:, 0]


def _fit_head(model: Model, states: ExactStates) -> None:
    """Logistic regression of the head alone on all exact states, from the learned weights on."""
    hidden, labels = _hidden(model, states)
    weight = model.head.weight.detach().double().requires_grad_()
    optimizer = torch.optim.LBFGS([weight], max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(hidden.double() @ weight.T, labels)
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]
    with torch.no_grad():
        model.head.weight.copy_(weight)


@torch.no_grad()
def check(
    model: Model,
    spec: RunSpec,
    length: int,
    sequences: int = 4,
    seed: int = 0,
    states: ExactStates | None = None,
) -> Check:
    """Run a model on fresh sequences of `length` tokens until its first wrong answer."""
    batch = spec.task.sample(sequences, (length, length), Generator().manual_seed(seed))
    state, position = None, 0
    for tokens, labels in zip(batch.inputs.split(SEGMENT, 1), batch.targets.split(SEGMENT, 1), strict=True):
        logits, state = model(tokens, state)
        wrong = (logits.argmax(-1) != labels).any(0)
        if wrong.any():
            return Check(length, position + int(wrong.byte().argmax()), None)
        position += tokens.shape[1]
    if states is None or state is None:
        return Check(length, None, None)
    distance = (state[0].S - states.S[batch.targets[:, -1]]).flatten(1).norm(dim=1).max()
    return Check(length, None, float(distance) / (states.separation / 2))
