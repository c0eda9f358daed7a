"""The delta rule with gates per channel, signs and rotations: backends against the loop, the loop against
mathematics and against formulas of others."""

import itertools
import math

import numpy as np
import pytest
import torch
from delta_inputs import random_inputs

from statetrack.errors import UserError
from statetrack.ops.checks import checked
from statetrack.ops.delta_rule import delta_rule

KINDS = {
    "g per channel": ("g", 4),
    "a per channel": ("a", 4),
    "a per head": ("a", 3),
    "sign per head": ("sign", 3),
    "g per head, sign per channel": ("g", 3, "sign", 4),
    "g and sign per channel": ("g", 4, "sign", 4),
    "angle": ("angle", 0),
    "angle, a per head": ("angle", 0, "a", 3),
    "angle, a per pair": ("angle", 0, "a", 4),
}


def gate_inputs(kind, B=2, T=7, H=2, K=6, V=5, n=1, seed=0, **options):
    """The inputs of `random_inputs`, and the gates of this kind, float64."""
    inputs = random_inputs(B, T, H, K, V, n, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed + 1)
    given = KINDS[kind]
    for name, axes in zip(given[::2], given[1::2], strict=True):
        width = K // 2 if name == "angle" or (axes == 4 and "angle" in given) else K
        shape = (B, T, H) if axes == 3 else (B, T, H, width)
        s = torch.rand(shape, generator=generator, dtype=torch.float64)
        value = {"g": s.log() / 4, "a": 2 * s - 1, "sign": torch.where(s < 0.5, -1.0, 1.0), "angle": 6 * s}
        inputs[name] = value[name].double()
    return inputs


def results(inputs, backend, dtype=torch.float64, **options):
    """Outputs, last state and every gradient of a scalar that depends on all of them."""
    leaves = {name: x.to(dtype).requires_grad_(name != "sign") for name, x in inputs.items()}
    o, S = delta_rule(**leaves, output_final_state=True, backend=backend, **options)
    names = [name for name in leaves if name != "sign"]
    weights = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)
    loss = (o.double() * weights).sum() + (S.double() ** 2).sum()
    gradients = torch.autograd.grad(loss, [leaves[name] for name in names])
    return {"o": o.detach(), "S": S.detach()} | {
        f"d{name}": x for name, x in zip(names, gradients, strict=True)
    }


def assert_near(actual, expected, tolerance):
    """Each result to this tolerance, relative to its own largest entry."""
    for name, value in expected.items():
        scale = value.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(
            actual[name].double() / scale,
            value / scale,
            rtol=0,
            atol=tolerance,
            msg=lambda m, name=name: f"{name}: {m}",
        )


@pytest.mark.parametrize(("T", "n"), [(1, 1), (32, 1), (33, 1), (70, 1), (21, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_chunked_matches_the_loop_in_float64(kind, T, n):
    inputs = gate_inputs(kind, T=T, n=n, state=True)
    options = {"householders": n, "use_qk_l2norm_in_kernel": n == 2}
    assert_near(results(inputs, "chunked", **options), results(inputs, "reference", **options), 1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_with_gates_match_the_loop(kind):
    bounds = torch.tensor([0, 0, 33, 34, 70])
    inputs = gate_inputs(kind, B=1, T=70, state=True, sequences=4)
    options = {"cu_seqlens": bounds}
    expected = results(inputs, "reference", **options)
    assert_near(results(inputs, "chunked", **options), expected, 1e-11)
    assert_near(results(inputs, "auto", torch.float32, **options), expected, 1e-5)


@pytest.mark.parametrize(("T", "n"), [(1, 1), (70, 1), (33, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_native_kernels_match_the_loop(kind, T, n):
    inputs = gate_inputs(kind, T=T, n=n, state=True)
    options = {"householders": n, "use_qk_l2norm_in_kernel": True}
    expected = results(inputs, "reference", **options)
    assert_near(results(inputs, "native", torch.float32, **options), expected, 1e-5)


@pytest.mark.parametrize("kind", ["a per head", "angle", "g and sign per channel", "angle, a per pair"])
def test_the_triton_kernels_match_the_loop(kind):
    inputs = gate_inputs(kind, B=1, T=37, H=1, state=True)
    expected = results(inputs, "reference", use_qk_l2norm_in_kernel=True)
    actual = results(inputs, "triton", torch.float32, use_qk_l2norm_in_kernel=True)
    assert_near(actual, expected, 1e-5)


def test_chunks_with_and_without_small_gates_per_channel_have_their_gradients_from_two_launches():
    inputs = gate_inputs("a per channel", B=1, T=37, H=1, state=True)
    inputs["a"] = torch.where(inputs["a"] < 0, -1, 1) * (0.3 + 0.7 * inputs["a"].abs())
    inputs["a"][:, 3, :, 5] = 0.01  # in the first of two chunks
    expected = results(inputs, "reference", use_qk_l2norm_in_kernel=True)
    actual = results(inputs, "triton", torch.float32, use_qk_l2norm_in_kernel=True)
    assert_near(actual, expected, 1e-5)


@pytest.mark.parametrize("kind", ["g per channel", "a per channel", "g and sign per channel", "a per head"])
def test_gates_beyond_one_are_computed_by_the_triton_kernels_as_defined(kind):
    """States that grow by up to a third a step, across a chunk's border; a single one of 0 among them."""
    inputs = gate_inputs(kind, B=1, T=37, H=1, beta=(0.0, 0.4), state=True)
    if kind.startswith("a"):
        inputs["a"] = torch.where(inputs["a"] < 0, -1.3, 1.2).double()
        inputs["a"][:, 20] = 0
    else:
        inputs["g"] = -inputs["g"].clamp(min=-0.3)
    expected = results(inputs, "reference", use_qk_l2norm_in_kernel=True)
    assert expected["o"].abs().max() > 2
    assert_near(results(inputs, "triton", torch.float32, use_qk_l2norm_in_kernel=True), expected, 2e-5)


def test_the_triton_kernels_take_packed_sequences_and_logits_with_gates_per_channel():
    inputs = gate_inputs("g per channel", B=1, T=20, H=1, K=5, V=20)
    options = {"cu_seqlens": torch.tensor([0, 2, 2, 20]), "beta_from_logits": 2.0}
    expected = results(inputs, "reference", **options)
    assert_near(results(inputs, "triton", torch.float32, **options), expected, 1e-5)


def test_the_loop_is_a_product_of_explicit_matrices():
    """Gates per pair, rotations and a reflection in numpy, with no shared code."""
    inputs = gate_inputs("angle, a per pair", B=1, T=6, H=1, K=4, V=3, state=True)
    q, k, v, beta, a, angle = (
        inputs[name][0, :, 0].numpy() for name in ("q", "k", "v", "beta", "a", "angle")
    )
    S, rows = inputs["initial_state"][0, 0].numpy(), []
    for t in range(6):
        R = np.zeros((4, 4))
        for pair, phi in enumerate(angle[t]):
            R[pair, pair] = R[pair + 2, pair + 2] = math.cos(phi)
            R[pair + 2, pair], R[pair, pair + 2] = math.sin(phi), -math.sin(phi)
        transition = (np.eye(4) - beta[t] * np.outer(k[t], k[t])) @ np.diag(np.tile(a[t], 2)) @ R
        S = transition @ S + beta[t] * np.outer(k[t], v[t])
        rows.append(S.T @ q[t] / 2)
    o, final = delta_rule(**inputs, output_final_state=True, backend="reference")
    np.testing.assert_allclose(o[0, :, 0].numpy(), np.stack(rows), atol=1e-12)
    np.testing.assert_allclose(final[0, 0].numpy(), S, atol=1e-12)


def test_kda_follows_the_equation_of_flash_linear_attention():
    """Decay every channel, then correct what the key finds: the recurrence of fla's naive_recurrent_kda."""
    x = {name: y.float() for name, y in gate_inputs("g per channel", T=40, H=1).items()}
    S, outputs = torch.zeros(2, 1, 6, 5), []
    for t in range(40):
        S = S * x["g"][:, t, :, :, None].exp()
        found = (x["k"][:, t, :, :, None] * S).sum(-2)
        S = S + (x["beta"][:, t, :, None] * x["k"][:, t])[..., None] * (x["v"][:, t] - found)[..., None, :]
        outputs.append((S * x["q"][:, t, :, :, None]).sum(-2) / 6**0.5)
    o, final = delta_rule(**x, output_final_state=True)
    torch.testing.assert_close(o, torch.stack(outputs, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(final, S, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_signed_gates_agree_with_transformers_on_folded_inputs(backend):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    x = {name: y.float() for name, y in gate_inputs("a per head", T=45, K=8, V=8).items()}
    c = x["a"].sign().cumprod(1)
    expected, state = torch_chunk_gated_delta_rule(
        x["q"] * c[..., None],
        x["k"] * c[..., None],
        x["v"],
        x["a"].abs().log(),
        x["beta"],
        output_final_state=True,
    )
    o, S = delta_rule(**x, output_final_state=True, backend=backend)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(S, state * c[:, -1, :, None, None], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("kind", ["a per head", "a per channel", "angle, a per pair"])
def test_gradcheck_across_zero(kind, backend):
    """Differences of the central kind at a = 0 step to both sides of it."""
    inputs = gate_inputs(kind, B=1, T=5, H=1, K=4, V=2, state=True)
    inputs["a"][:, ::2] = 0
    leaves = [x.requires_grad_() for x in inputs.values()]

    def f(*tensors):
        return delta_rule(**dict(zip(inputs, tensors, strict=True)), output_final_state=True, backend=backend)

    assert torch.autograd.gradcheck(f, leaves)


@pytest.mark.parametrize(
    ("kind", "backend", "size"),
    [
        *itertools.product(("a per head", "a per channel"), ("chunked", "native"), (0.0, 1e-8, 1e-3)),
        ("a per head", "triton", 1e-8),
        ("a per channel", "triton", 0.0),
    ],
)
def test_zero_and_tiny_gates_keep_everything_after_them_and_have_their_true_gradient(kind, backend, size):
    """Gates of this size over a whole chunk, then ordinary ones with zeros among them."""
    inputs = gate_inputs(kind, B=1, T=48, H=1, K=4, V=4, state=True)
    inputs["a"][:, :34] *= size
    inputs["a"][:, 36::5] = 0
    expected = results(inputs, "reference")
    assert expected["da"][:, 40:].abs().max() > 0.01
    assert_near(results(inputs, backend, torch.float32), expected, 1e-4)


@pytest.mark.parametrize("kind", ["a per head", "a per channel", "angle, a per head"])
def test_float32_is_good_to_1e_4_near_the_border_at_length_2048(kind):
    """Gates of size 0.99 to 1 and beta in [1.5, 2], where rounding errors hardly decay."""
    inputs = gate_inputs(kind, B=1, T=2048, H=1, K=16, V=16, beta=(1.5, 2.0))
    a = inputs["a"]
    inputs["a"] = a.sign() * (0.99 + 0.01 * a.abs())
    with torch.no_grad():
        expected, S = delta_rule(**inputs, output_final_state=True, backend="reference")
        actual, final = delta_rule(**{n: x.float() for n, x in inputs.items()}, output_final_state=True)
    assert (actual - expected).norm() / expected.norm() < 1e-4
    assert (final - S).norm() / S.norm() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_token_by_token_equals_the_whole(kind):
    inputs = {name: x.float() for name, x in gate_inputs(kind, T=40).items()}
    whole, last = delta_rule(**inputs, output_final_state=True)
    _, S = delta_rule(**{name: x[:, :35] for name, x in inputs.items()}, output_final_state=True)
    for t in range(35, 40):
        step = {name: x[:, t : t + 1] for name, x in inputs.items()}
        o, S = delta_rule(**step, initial_state=S, output_final_state=True)
        torch.testing.assert_close(o, whole[:, t : t + 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(S, last, rtol=1e-4, atol=1e-5)


def test_rotations_and_reflections_of_one_head_track_a_dihedral_group():
    """K = 2: a turn by 72 degrees, or a reflection (beta = 2). The state is the element of D_5."""
    letters = torch.randint(2, (1000,), generator=torch.Generator().manual_seed(0))
    turn, flip = 0, 1  # the element: turn by 72 degrees this often, after a flip or not
    for letter in letters.tolist():
        turn, flip = (turn + 1, flip) if letter == 0 else (-turn, -flip)
    phi = 2 * math.pi * turn / 5
    expected = torch.tensor([[math.cos(phi), -math.sin(phi)], [math.sin(phi), math.cos(phi)]])
    expected = expected @ torch.diag(torch.tensor([1.0, float(flip)]))
    k = torch.tensor([0.0, 1.0]).expand(1, 1000, 1, 2)
    angle = (letters == 0).view(1, 1000, 1, 1) * (2 * math.pi / 5)
    beta = 2.0 * (letters == 1).view(1, 1000, 1)
    _, S = delta_rule(
        k, k, 0 * k, beta, angle=angle, initial_state=torch.eye(2).view(1, 1, 2, 2), output_final_state=True
    )
    torch.testing.assert_close(S[0, 0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", ["chunked", "auto"])
def test_a_reflection_and_signs_per_channel_count_modulo_five(backend):
    """(I - 2 k k^T) diag(1, -1) turns by 2 p + pi with k = (cos p, sin p): docs/gates.md."""
    T, n = 3000, 5
    letters = torch.randint(n, (T,), generator=torch.Generator().manual_seed(0))
    p = (2 * math.pi * letters.double() / n - math.pi) / 2
    k = torch.stack([p.cos(), p.sin()], dim=-1).float()[None, :, None]
    start = torch.tensor([[1.0], [0.0]])[None, None]
    o, _ = delta_rule(
        torch.eye(2)[:, None, None].expand(2, T, 1, 2),  # both channels of the state are read
        k.expand(2, T, 1, 2),
        torch.zeros(2, T, 1, 1),
        torch.full((2, T, 1), 2.0),
        sign=torch.tensor([1.0, -1.0]).expand(2, T, 1, 2),
        initial_state=start.expand(2, 1, 2, 1),
        scale=1.0,
        backend=backend,
    )
    angle = torch.atan2(o[1, :, 0, 0], o[0, :, 0, 0])
    assert torch.equal((angle * n / (2 * math.pi)).round().long() % n, letters.cumsum(0) % n)


@pytest.mark.parametrize("gates", ["none", "a per head", "a per channel"])
@pytest.mark.parametrize("backend", ["reference", "chunked", "auto", "triton"])
def test_turned_keys_of_half_precision_keep_the_norm_of_the_state(backend, gates):
    """Reflections and fifths of a turn: with turned keys in bfloat16 it is lost in a few hundred steps."""
    T = 100 if backend == "triton" else 1000
    reflects = torch.rand(1, T, 1, generator=torch.Generator().manual_seed(0)) < 0.5
    angle = torch.where(reflects[..., None], 0.0, 2 * math.pi / 5)
    k = torch.tensor([1.0, 0.0]).expand(1, T, 1, 2).bfloat16()
    a = {"none": {}, "a per head": {"a": torch.ones(1, T, 1)}, "a per channel": {"a": torch.ones(1, T, 1, 1)}}
    _, S = delta_rule(
        k,
        k,
        0 * k,
        torch.where(reflects, 2.0, 0.0).bfloat16(),
        angle=angle,
        **a[gates],
        initial_state=torch.eye(2)[None, None],
        output_final_state=True,
        backend=backend,
    )
    torch.testing.assert_close(S @ S.mT, torch.eye(2)[None, None], rtol=0, atol=1e-4)


def test_infinity_at_a_step_leaves_earlier_outputs_alone():
    inputs = {name: x.float() for name, x in gate_inputs("a per channel", B=1, T=50).items()}
    clean, _ = delta_rule(**inputs)
    inputs["v"][:, 40] = torch.inf
    torch.testing.assert_close(delta_rule(**inputs)[0][:, :40], clean[:, :40])


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_cpu_auto_takes_the_native_kernels_for_every_kind_of_gate(kind, monkeypatch):
    monkeypatch.delenv("STATETRACK_BACKEND", raising=False)
    inputs = {name: x.float() for name, x in gate_inputs(kind, T=40).items()}
    assert torch.equal(delta_rule(**inputs)[0], delta_rule(**inputs, backend="native")[0])
    for name in ("chunked", "reference"):
        assert not torch.equal(delta_rule(**inputs)[0], delta_rule(**inputs, backend=name)[0])


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("a per head", {"g": torch.zeros(2, 7, 2)}, "either g, the logarithm of the gate, or a"),
        ("a per head", {"sign": torch.ones(2, 7, 2)}, "sign goes with g only"),
        (
            "a per head",
            {"a": torch.ones(2, 2, 7)},
            r"a has shape \(2, 2, 7\), expected \(batch, time, heads\)",
        ),
        (
            "a per channel",
            {"a": torch.ones(2, 7, 2, 3)},
            r"expected \(batch, time, heads, K\) = \(2, 7, 2, 6\)",
        ),
        ("angle", {"angle": torch.ones(2, 7, 2, 6)}, r"angle has shape .* K / 2\) = \(2, 7, 2, 3\)"),
        ("angle", {"angle": [1.0]}, "angle is a list, expected a tensor"),
        ("angle", {"g": torch.ones(2, 7, 2, 6)}, r"g has shape .* K / 2\) = \(2, 7, 2, 3\)"),
    ],
)
def test_wrong_gates_are_refused_by_name(kind, changes, message):
    inputs = {name: x.float() for name, x in gate_inputs(kind).items()} | changes
    with pytest.raises(UserError, match=message):
        delta_rule(**inputs)


def test_the_triton_kernels_refuse_several_factors_with_gates_per_channel_and_auto_serves_them():
    inputs = {name: x.float() for name, x in gate_inputs("a per channel", n=2).items()}
    with pytest.raises(UserError, match="several Householder factors"):
        delta_rule(**inputs, householders=2, backend="triton")
    assert delta_rule(**inputs, householders=2)[0].shape == (2, 7, 2, 5)


def test_odd_keys_cannot_turn():
    x = {name: y.float() for name, y in random_inputs(K=5).items()}
    with pytest.raises(UserError, match="K = 5 is odd"):
        delta_rule(**x, angle=torch.ones(2, 7, 2, 2))


def test_checked_mode_looks_at_gates():
    good = gate_inputs("g per head, sign per channel")
    with checked():
        delta_rule(**good)
        with pytest.raises(UserError, match=r"\|sign\|\[0, 0, 0, 0\] = 0 is outside \[1, 1\]"):
            delta_rule(**good | {"sign": 0 * good["sign"]})
        bad = gate_inputs("a per channel")
        with pytest.raises(UserError, match=r"a\[0, 0, 0, 0\] = -1.5 is outside \[-1, 1\]"):
            delta_rule(**bad | {"a": torch.full_like(bad["a"], -1.5)})


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch itself
@pytest.mark.parametrize(
    ("kind", "backend"),
    [("a per head", "native"), ("angle, a per pair", "native"), ("g per channel", "triton")],
)
def test_gates_compile_without_a_break(kind, backend):
    inputs = {name: x.float() for name, x in gate_inputs(kind, B=1, T=17, H=1, K=4, V=4).items()}

    def run(inputs):
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        o, S = rule(**leaves, output_final_state=True, backend=backend)
        return [o, S, *torch.autograd.grad(o.sum() + S.sum(), list(leaves.values()))]

    rule = delta_rule
    expected = run(inputs)
    rule = torch.compile(delta_rule, fullgraph=True, backend="aot_eager")
    for actual, value in zip(run(inputs), expected, strict=True):
        torch.testing.assert_close(actual, value)
