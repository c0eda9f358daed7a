"""Snapping: exact transitions are found near noisy ones, and a trained tracker becomes exact."""

import json
import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from statetrack.cli import main
from statetrack.errors import UserError
from statetrack.files import save_tensors, write_json
from statetrack.layers import model_config
from statetrack.layers.model import Model
from statetrack.run import load_run, run
from statetrack.snapping import check, snap
from statetrack.snapping.geometry import (
    KINDS,
    fit_isometry,
    fixed_point,
    kinds,
    reflections,
    representation,
    representations,
    swaps_from_keys,
)
from statetrack.snapping.learned import read
from statetrack.snapping.snap import LARGEST_TOLERANCE, _best_fit, _why_not, round_transitions
from statetrack.snapping.weights import (
    LOWEST_VALUE,
    ExactHead,
    check_written,
    fit_values,
    inverse_silu,
    write,
)
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import WordProblem
from statetrack.tasks.groups import group
from statetrack.training import Options


def random_isometry(rng, K, r):
    return np.linalg.qr(rng.standard_normal((K, r)))[0]


def product(vectors, size):
    """The matrix of reflections, the first vector applied first."""
    P = np.eye(size)
    for v in vectors:
        P = P - 2 * np.outer(v, v @ P)
    return P


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["S2", "S4", "A4", "S5"])
def test_the_reflections_of_an_element_multiply_to_its_matrix(name, kind):
    found = group(name).permutations
    for p, R in zip(found, representation(found, kind), strict=True):
        vectors = reflections(p.tolist(), kind)
        np.testing.assert_allclose(product(vectors, len(R)), R, atol=1e-12)
        assert len(vectors) == np.linalg.matrix_rank(R - np.eye(len(R)), tol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_representation_multiplies_as_the_group_does(kind):
    s4 = group("S4")
    R = representation(s4.permutations, kind)
    for a, b in combinations(range(24), 2):
        np.testing.assert_allclose(R[b] @ R[a], R[s4.then[a, b]], atol=1e-12)


@pytest.mark.parametrize("m", [2, 3, 4, 5, 12, 60])
def test_every_rotation_of_a_cyclic_group_is_a_product_of_at_most_two_reflections(m):
    cyclic = group(f"Z{m}")
    found = representations(cyclic)
    assert len(found) == m // 2
    for w, rotations in enumerate(found, start=1):
        R = rotations.matrices
        a, b = np.divmod(np.arange(m * m), m)
        np.testing.assert_allclose(R[b] @ R[a], R[cyclic.then[a, b]], atol=1e-12)
        for x in range(m):
            vectors = rotations.reflections(x)
            np.testing.assert_allclose(product(vectors, len(R[x])), R[x], atol=1e-12)
            assert len(vectors) == (0 if w * x % m == 0 else len(R[x]))


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("w", range(1, 7))
def test_noisy_rotations_are_rounded_to_their_own(w, mirrored):
    """In a plane of either orientation; a rotation by w/12 and one by -w/12 are the same up to a mirror."""
    rng, z12 = np.random.default_rng(w), group("Z12")
    exact = representations(z12)[w - 1]
    r = exact.matrices.shape[1]
    T = random_isometry(rng, 6, r)
    R = exact.matrices.swapaxes(1, 2) if mirrored else exact.matrices
    learned = np.eye(6) + T @ (R - np.eye(r)) @ T.T + 0.01 * rng.standard_normal((12, 6, 6))
    found, fit = _best_fit(learned, representations(z12), np.arange(12))
    assert found.name == exact.name == f"rotation by {w}/12 of a turn"
    np.testing.assert_allclose(fit.isometry @ fit.isometry.T, T @ T.T, atol=0.1)
    vectors = [found.reflections(x) for x in range(12)]
    assert _why_not(fit, np.arange(12), vectors, found, z12, 2, 0.25) == ""
    # one token at the angle of its neighbour
    learned[5] = learned[6]
    found, fit = _best_fit(learned, representations(z12), np.arange(12))
    assert _why_not(fit, np.arange(12), vectors, found, z12, 2, 0.7) != ""


@settings(max_examples=25, deadline=None)
@given(n=st.integers(3, 6), seed=st.integers(0, 2**32 - 1), noise=st.floats(0, 0.02))
def test_noisy_reflections_are_rounded_to_their_swaps(n, seed, noise):
    """Keys at random signs in a random subspace, with errors, and beta a little below 2."""
    rng = np.random.default_rng(seed)
    swaps, K = list(combinations(range(n), 2)), n + 3
    T = random_isometry(rng, K, n - 1)
    order = rng.permutation(len(swaps))
    permutations = np.tile(np.arange(n), (len(swaps), 1))
    for row, (i, j) in zip(permutations, (swaps[x] for x in order), strict=True):
        row[[i, j]] = j, i
    roots = np.concatenate([reflections(p.tolist()) for p in permutations])
    keys = rng.choice([-1, 1], (len(swaps), 1)) * roots @ T.T + noise * rng.standard_normal((len(swaps), K))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    points = {frozenset(np.flatnonzero(permutations[:, i] != i).tolist()) for i in range(n)}
    assert swaps_from_keys(keys) == points  # from angles alone
    learned = np.eye(K) - (2 - noise) * keys[:, :, None] * keys[:, None]
    exact = representation(permutations)
    fit = fit_isometry(learned, exact, exact)
    np.testing.assert_array_equal(fit.nearest, np.arange(len(swaps)))
    assert fit.misfit.max() <= 1e-6 + 15 * noise
    np.testing.assert_allclose(fit.isometry @ fit.isometry.T, T @ T.T, atol=1e-6 + 10 * noise)


@pytest.mark.parametrize("name", ["S2", "S3", "S4", "A4", "S5", "A5", "S6"])
def test_elements_are_further_apart_than_twice_the_tolerance(name):
    permutations = group(name).permutations
    for kind in kinds(permutations.shape[1]):
        R = representation(permutations, kind)
        apart = np.linalg.norm(R[1:] - R[0], ord=2, axis=(1, 2))  # 0 is the identity
        assert apart.min() > 2 * LARGEST_TOLERANCE


def test_parity_is_a_sign_and_not_the_trivial_representation():
    learned = np.stack([np.eye(4), np.diag([1.0, 1.0, -0.95, 1.0])])
    nearest, fit = _best_fit(learned, representations(group("S2")), np.arange(2))
    assert nearest.name == "standard representation"
    assert fit.misfit.max() == pytest.approx(0.05)
    np.testing.assert_array_equal(fit.nearest, [0, 1])


def test_keys_that_are_no_swaps_have_no_points():
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((10, 8))
    assert swaps_from_keys(keys / np.linalg.norm(keys, axis=1, keepdims=True)) is None
    assert swaps_from_keys(np.eye(4)) is None  # 4 is no number of swaps
    assert swaps_from_keys(np.eye(3)) is None  # three commuting reflections


def test_random_transitions_are_far_from_every_representation():
    rng = np.random.default_rng(0)
    s4 = group("S4")
    learned = np.eye(8) - 0.3 * rng.random((24, 8, 8))
    for kind in KINDS:
        exact = representation(s4.permutations, kind)
        assert fit_isometry(learned, exact, exact).misfit.max() > 0.7


def test_the_common_fixed_point_is_found():
    rng = np.random.default_rng(0)
    R, T = representation(group("S4").permutations), random_isometry(rng, 6, 3)
    A = np.eye(6) + T @ (R - np.eye(3)) @ T.T
    centre = rng.standard_normal((3, 5))
    offsets = T @ centre - A @ T @ centre
    np.testing.assert_allclose(fixed_point(A, offsets, T), centre, atol=1e-12)


def test_values_are_brought_into_the_range_of_silu():
    rng = np.random.default_rng(0)
    T = random_isometry(rng, 6, 3)
    keys = [reflections(p.tolist()) @ T.T for p in group("S4").permutations]
    signed, centre = fit_values(keys, T, 10 * rng.standard_normal((3, 5)))
    values = np.concatenate([k @ T @ centre for k in signed])
    assert values.min() >= LOWEST_VALUE - 1e-12
    assert all(np.allclose(abs((a * b).sum(1)), 1) for a, b in zip(keys, signed, strict=True))
    z = inverse_silu(torch.from_numpy(values))
    np.testing.assert_allclose(torch.nn.functional.silu(z).numpy(), values, atol=1e-12)


def noisy_tracker(noise=1e-3):
    """DeltaProduct with two heads, one of them near the permutations of 4 points, and all of S4 as inputs."""
    config = model_config("deltanet-no-conv", householders=3, d_model=32, heads=2)
    spec = RunSpec(WordProblem("S4"), config).resolved()
    torch.manual_seed(0)
    model, rng, s4 = Model(config, 25, 25), np.random.default_rng(0), group("S4")
    with torch.no_grad():
        model.embedding.weight.normal_()
        model.get_submodule("blocks.0.mixer.to_v").weight.mul_(4)
    mixer = model.get_submodule("blocks.0.mixer")
    learned = read(model, mixer, spec.task.elements, spec.task.bos)
    T = random_isometry(rng, 16, 3)
    vectors = [reflections(p.tolist()) @ T.T for p in s4.permutations]
    keys, centre = fit_values(vectors, T, rng.standard_normal((3, 16)))
    write(mixer, learned, [ExactHead(1, representations(s4)[0], keys, T, centre)])
    with torch.no_grad():
        mixer.to_k.weight.add_(noise * mixer.to_k.weight.std() * torch.randn_like(mixer.to_k.weight))
        mixer.to_beta.weight.mul_(0.05)  # betas short of 2
    return spec, model


def test_products_of_several_reflections_are_rounded():
    """After 3,000 tokens the state is still one of 24, that of the product so far."""
    spec, model = noisy_tracker()
    rounded, heads, states, error = round_transitions(model, spec)
    assert [bool(h.refused) for h in heads] == [True, False]
    assert heads[1].misfit > 1e-3
    assert error < 1e-5
    batch = spec.task.sample(4, (3000, 3000), torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, drifted = (m(batch.inputs)[1][0].S[:, 1] for m in (rounded, model))
    expected = states.S[batch.targets[:, -1], 1]
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01 * states.separation)
    assert (drifted - expected).norm() > states.separation


def test_heads_that_tell_residues_apart_only_together_are_rounded_together():
    """Z12 by its residues modulo 4 and 3: after 3,000 tokens the state is still that of the sum so far."""
    config = model_config("deltanet-no-conv", householders=2, d_model=32, heads=2)
    spec = RunSpec(WordProblem("Z12"), config).resolved()
    torch.manual_seed(0)
    model, rng, z12 = Model(config, 13, 13), np.random.default_rng(0), group("Z12")
    mixer = model.get_submodule("blocks.0.mixer")
    with torch.no_grad():
        model.embedding.weight.normal_()
        mixer.to_v.weight.mul_(4)
    learned = read(model, mixer, spec.task.elements, spec.task.bos)
    exact = []
    for head, w in enumerate((3, 4)):
        rotations, T = representations(z12)[w - 1], random_isometry(rng, 16, 2)
        vectors = [rotations.reflections(x) @ T.T for x in range(12)]
        keys, centre = fit_values(vectors, T, rng.standard_normal((2, 16)))
        exact.append(ExactHead(head, rotations, keys, T, centre))
    write(mixer, learned, exact)
    with torch.no_grad():
        mixer.to_k.weight.add_(1e-2 * mixer.to_k.weight.std() * torch.randn_like(mixer.to_k.weight))
    rounded, heads, states, error = round_transitions(model, spec)
    assert [h.representation for h in heads] == [f"rotation by {w}/12 of a turn" for w in (3, 4)]
    assert not any(h.refused for h in heads)
    assert min(h.misfit for h in heads) > 1e-3
    assert error < 1e-5
    assert states.separation > 0.1
    batch = spec.task.sample(4, (3000, 3000), torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, drifted = (m(batch.inputs)[1][0].S for m in (rounded, model))
    expected = states.S[batch.targets[:, -1]]
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01 * states.separation)
    assert (drifted - expected).norm() > states.separation


def test_tokens_whose_embeddings_depend_on_each_other_are_refused():
    spec, model = noisy_tracker()
    mixer = model.get_submodule("blocks.0.mixer")
    learned = read(model, mixer, spec.task.elements, spec.task.bos)
    learned.inputs[1] = learned.inputs[0]
    with pytest.raises(UserError, match="linearly dependent at width 32"):
        write(mixer, learned, [])


def test_transitions_that_float32_weights_cannot_hold_are_refused():
    """Where embeddings nearly depend on each other, the weights that tell them apart are huge."""
    spec, model = noisy_tracker()
    learned = read(model, model.get_submodule("blocks.0.mixer"), spec.task.elements, spec.task.bos)
    check_written(5e-4, learned)
    with pytest.raises(UserError, match=r"only to 0\.006 in float32, because the embeddings of the 25"):
        check_written(0.006, learned)


def test_a_read_out_that_cannot_tell_the_elements_apart_is_refused():
    spec, model = noisy_tracker()  # whose read-out is random
    with pytest.raises(UserError, match=r"does not tell all 24 elements apart .* Silenced was head 0: token"):
        snap(model, spec)


def test_too_few_reflections_per_token_are_said_to_be_too_few():
    s4 = group("S4")
    standard, tokens = representations(s4)[0], np.arange(24)
    R, vectors = standard.matrices, [standard.reflections(x) for x in range(24)]
    fit = fit_isometry(R, R, R)
    assert _why_not(fit, tokens, vectors, standard, s4, 3, 0.25) == ""
    assert "needs 3 reflections, and the layer has 2" in _why_not(fit, tokens, vectors, standard, s4, 2, 0.25)


SWAPS_OF_S3 = RunSpec(
    WordProblem("S3", "swaps"),
    model_config("deltanet-no-conv", d_model=32, heads=2),
    TrainingConfig(steps=300, batch=32, lr=3e-3, train_lengths=(16, 16), warmup=0.02, weight_decay=0.01),
    EvaluationConfig(eval_lengths=(16,), eval_samples=64),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The swaps of S3: a few seconds of training."""
    folder = tmp_path_factory.mktemp("tracker") / "s3"
    run(SWAPS_OF_S3, folder, Options("cpu", say=lambda text: None))
    return folder


def test_a_trained_tracker_that_drifts_is_exact_once_snapped(trained, capsys):
    main(["snap", str(trained), "--length", "20000", "--sequences", "2"])
    shown = capsys.readouterr().out
    # 3 swaps and the identity after 6 elements, and the start token, whose answer no other has
    assert re.search(r"right on \d+\.\d\d% of all \(state, token\) \(commonest answer 16\.00%\)", shown)
    assert "snapped    right at every token" in shown
    assert "keys' angles alone give the swaps" in shown
    spec, model = load_run(trained)
    same, snapped = load_run(f"{trained}-snapped")
    assert same == spec
    assert check(model, spec, 20_000, 2, seed=1).first_error is not None
    assert check(snapped, spec, 20_000, 2, seed=1).first_error is None
    report = json.loads((trained.parent / "s3-snapped/snap.json").read_text())
    assert report["check"]["snapped"]["first_error"] is None
    kept = {"embedding.weight", "blocks.0.mixer.to_q.weight", "blocks.0.mixer.to_out.weight"}
    assert all(torch.equal(model.state_dict()[name], snapped.state_dict()[name]) for name in kept)
    main(["snap", str(trained), "--length", "10", "--sequences", "1"])  # again into the same folder


def test_a_tied_model_is_snapped_with_a_head_of_its_own(trained, tmp_path, capsys):
    """Its head is fitted again, and its embedding, from which keys and values are computed, is kept."""
    spec, model = load_run(trained)
    tied = replace(spec, model=replace(spec.model, tied=True))
    other = Model(tied.model, spec.task.vocab_size, spec.task.n_classes)
    other.load_state_dict({k: x for k, x in model.state_dict().items() if k != "head.weight"})
    snapped = snap(other, tied)
    assert snapped.read_out == "fitted again"
    assert not snapped.model.config.tied
    assert torch.equal(snapped.model.embedding.weight, model.embedding.weight)
    assert check(snapped.model, tied, 5_000, 2, states=snapped.states).first_error is None
    write_json(tmp_path / "run/spec.json", tied.to_dict())
    save_tensors(tmp_path / "run/model.safetensors", other.state_dict())
    main(["snap", str(tmp_path / "run"), "--length", "100", "--sequences", "1"])
    read_again = load_run(tmp_path / "run-snapped")[1]
    assert torch.equal(read_again.head.weight, snapped.model.head.weight)


@pytest.mark.parametrize("command", ["snap", "diagnose"])
def test_seeds_and_lengths_out_of_range_are_named(command, trained, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([command, str(trained), "--seed", "99999999999999999999"])
    assert "seed is 99999999999999999999, expected a whole number" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([command, str(trained), {"snap": "--length", "diagnose": "--longest"}[command], "0"])
    assert re.search(r"(length|longest) is 0, expected at least", capsys.readouterr().err)


def test_a_run_is_not_overwritten(trained, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["snap", str(trained), "--out", str(trained)])
    assert "holds a run, which would be overwritten" in capsys.readouterr().err


def test_an_untrained_model_is_refused_with_each_heads_reason():
    spec = SWAPS_OF_S3.resolved()
    with pytest.raises(UserError, match=r"no head has learned .* head 0: token .* head 1: token .* Train"):
        snap(Model(spec.model, 7, 7), spec)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"eigenvalues": "[0,1]"}, "eigenvalue -1"),
        ({"convolution": 4}, "depends on the tokens before"),
        ({"layers": 2}, "the model has 2 layers, expected 1"),
        ({"gated": True}, "its decay shrinks the state"),
        ({"qk_activation": "silu"}, "expected 'identity'"),
    ],
)
def test_models_without_exact_transitions_of_tokens_are_refused(changes, reason):
    config = model_config("deltanet-no-conv", d_model=8, heads=1, **changes)
    with pytest.raises(UserError, match=reason):
        snap(Model(config, 7, 7), replace(SWAPS_OF_S3, model=config).resolved())


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (WordProblem("Z1"), "expected S_n, A_n or Z_m"),
        (WordProblem("1 0 2; 1 2 0"), "expected S_n, A_n or Z_m"),
        (WordProblem("S3", tokens_per_element=2), "tokens_per_element is 2, expected 1"),
    ],
)
def test_tasks_without_a_permutation_per_token_are_refused(task, reason):
    config = SWAPS_OF_S3.model
    with pytest.raises(UserError, match=reason):
        snap(Model(config, task.vocab_size, task.n_classes), RunSpec(task, config).resolved())


def test_other_mixers_and_meaningless_tolerances_are_refused():
    spec = SWAPS_OF_S3.resolved()
    mamba = model_config("mamba", d_model=8)
    with pytest.raises(UserError, match="the mixer is Mamba"):
        snap(Model(mamba, 7, 7), replace(spec, model=mamba))
    with pytest.raises(UserError, match=r"tolerance is 1, expected above 0 and at most 0\.7"):
        snap(Model(spec.model, 7, 7), spec, tolerance=1.0)
