"""mLSTM and sLSTM against the published xlstm package, on the same random weights."""

import pytest
import torch
import xlstm

from statetrack.errors import UserError
from statetrack.layers import MLSTMConfig, build

WIDTH, LAYERS, VOCABULARY = 32, 3, 11

# theirs -> ours; in their sLSTM the projection called fgate drives the input gate, and igate the forget gate
NAMES = {
    "token_embedding": "embedding",
    "lm_head": "head",
    "xlstm_block_stack.post_blocks_norm": "norm",
    "xlstm_block_stack.": "",
    "xlstm_norm": "mixer_norm",
    "ffn_norm": "mlp_norm",
    "mlstm_cell.igate": "to_i",
    "mlstm_cell.fgate": "to_f",
    "mlstm_cell.outnorm": "norm",
    "group_norm": "norm",
    "xlstm.fgate": "xlstm.to_i",
    "xlstm.igate": "xlstm.to_f",
    "xlstm.zgate": "xlstm.to_z",
    "xlstm.ogate": "xlstm.to_o",
    "conv1d.conv": "convolution",
    "learnable_skip": "skip",
    "xlstm.proj_up": "xlstm.to_up",
    "xlstm.proj_down": "xlstm.to_out",
    "q_proj": "to_q",
    "k_proj": "to_k",
    "v_proj": "to_v",
    "ffn.proj_down": "mlp.down",
    "slstm_cell._recurrent_kernel_": "recurrent",
    "slstm_cell._bias_": "bias",
    ".xlstm.": ".mixer.",
}


def published(kind, heads, **changes):
    """A fresh model of the xlstm package with blocks of one kind."""
    if kind == "mlstm":
        block = xlstm.mLSTMBlockConfig(mlstm=xlstm.mLSTMLayerConfig(num_heads=heads))
        blocks = {"mlstm_block": block}
    else:
        layer = xlstm.sLSTMLayerConfig(num_heads=heads, backend="vanilla", dtype="float32", **changes)
        blocks = {"slstm_block": xlstm.sLSTMBlockConfig(slstm=layer)}
    config = xlstm.xLSTMLMModelConfig(
        vocab_size=VOCABULARY, context_length=300, num_blocks=LAYERS, embedding_dim=WIDTH, **blocks
    )
    return xlstm.xLSTMLMModel(config)


def translated(theirs, heads):
    """Their weights under our names and in our shapes."""
    weights = {}
    for name, p in theirs.state_dict().items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if "norm" in name:
            weights[name], weights[name.replace("weight", "bias")] = 1 + p, torch.zeros_like(p)
        elif "ffn.proj_up" in name:
            for part, half in zip(("gate", "up"), p.chunk(2), strict=True):
                weights[name.replace("ffn.proj_up", f"mlp.{part}")] = half
        elif name.endswith("recurrent"):
            weights[name] = p.mT
        elif name.endswith("mixer.bias"):
            weights[name] = p.view(4, heads, -1).transpose(0, 1)
        else:
            weights[name] = p
    return {name: p for name, p in weights.items() if not name.endswith("mixer.norm.bias")}


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("kind", ["mlstm", "slstm"])
def test_logits_equal_those_of_the_xlstm_package_on_the_same_weights(kind, heads):
    torch.manual_seed(0)
    theirs = published(kind, heads).eval().double()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.2 * torch.randn_like(p))
    ours = build(kind, vocab_size=VOCABULARY, d_model=WIDTH, layers=LAYERS, heads=heads).double()
    ours.load_state_dict(translated(theirs, heads))
    ids = torch.randint(VOCABULARY, (2, 150), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], theirs(ids), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "ours", "theirs"),
    [
        ("mlstm", {}, {}),
        ("slstm", {}, {}),
        ("slstm", {"bias_init": "linspace"}, {"bias_init": "small_init"}),
        ("slstm", {"bias_init": "standard"}, {"bias_init": "standard"}),
    ],
)
def test_initial_weights_follow_the_distribution_of_the_xlstm_package(kind, ours, theirs):
    torch.manual_seed(0)
    expected = translated(published(kind, 4, **theirs), 4)
    actual = build(kind, vocab_size=VOCABULARY, d_model=WIDTH, layers=LAYERS, **ours).state_dict()
    assert actual.keys() == expected.keys()
    for name, p in expected.items():
        if name in ("embedding.weight", "head.weight"):  # these belong to our backbone
            continue
        if p.unique().numel() <= 1 or (name.endswith("mixer.bias") and ours.get("bias_init") != "standard"):
            torch.testing.assert_close(actual[name], p)
        elif p.numel() >= 100:
            spread = p.std().item()
            assert actual[name].std().item() == pytest.approx(spread, rel=0.25), name
            assert actual[name].mean().item() == pytest.approx(p.mean().item(), abs=spread / 2), name


def test_mlstm_forget_gates_start_between_3_and_6_or_as_any_linear_layer():
    mixer = build("mlstm", vocab_size=3).blocks[0].mixer
    torch.testing.assert_close(mixer.to_f.bias.data, torch.tensor([3.0, 4.0, 5.0, 6.0]))
    standard = build("mlstm", vocab_size=3, bias_init="standard").blocks[0].mixer
    assert standard.to_f.bias.abs().max() <= (3 * 256) ** -0.5


def test_published_widths():
    """At width 128: mLSTM twice as wide inside, the feed-forward of sLSTM 1.3 times rounded up to 192."""
    assert build("mlstm", vocab_size=3).blocks[0].mixer.to_up.out_features == 2 * 256
    assert build("slstm", vocab_size=3).blocks[0].mlp.gate.out_features == 192


@pytest.mark.parametrize("name", ["mlstm", "slstm"])
def test_spectrum_is_the_forget_gate_so_never_negative(name):
    torch.manual_seed(0)
    model = build(name, vocab_size=7, d_model=16, layers=2)
    for spectrum in model.transition_eigenvalues(torch.randint(7, (2, 9))):
        assert spectrum.min() > 0
        assert spectrum.max() < 1


@pytest.mark.parametrize("name", ["mlstm", "slstm"])
def test_states_stay_float32_under_autocast(name):
    model = build(name, vocab_size=7, d_model=16)
    with torch.autocast("cpu", torch.bfloat16):
        y, states = model(torch.zeros(2, 5, dtype=torch.long))
    y.float().sum().backward()
    assert {s.dtype for s in states[0].cell} == {torch.float32}


@pytest.mark.parametrize("name", ["mlstm", "slstm"])
def test_unknown_bias_inits_are_refused(name):
    with pytest.raises(UserError, match="Did you mean 'standard'"):
        build(name, vocab_size=7, bias_init="standart")


@pytest.mark.parametrize(
    ("field", "value"),
    [("proj_factor", 0.0), ("proj_factor", float("nan")), ("convolution", 0), ("qkv_block", 0), ("heads", 0)],
)
def test_sizes_that_make_no_mlstm_are_refused(field, value):
    with pytest.raises(UserError, match=f"MLSTM: {field} is {value}, expected a"):
        MLSTMConfig(**{field: value}).build(16, 1)


@torch.no_grad()
@pytest.mark.parametrize("eigenvalues", ["[0,1]", "[-1,1]"])
def test_without_normaliser_the_mlstm_reads_its_memory_as_it_is(eigenvalues):
    """C_t = f_t C_{t-1} + sigmoid(i_t) k_t v_t^T / sqrt(K), h_t = C_t^T q_t: mLSTMsig of Beck et al. 2025."""
    torch.manual_seed(0)
    mixer = MLSTMConfig(heads=2, eigenvalues=eigenvalues, normaliser=False).build(WIDTH, 1).double()
    for p in mixer.parameters():
        p.add_(0.3 * torch.randn_like(p))
    x = torch.randn(1, 20, WIDTH).double()
    y, _ = mixer(x)
    u, z = mixer.to_up(x).chunk(2, dim=-1)
    skipped, _ = mixer.convolution(u, silu=True)
    qkv, i, f = (a[0] for a in mixer._controls(u, skipped))
    q, k, v = qkv.unbind(1)
    z, skipped = z[0], skipped[0]
    C = torch.zeros(2, 32, 32).double()
    for t in range(20):
        gate = torch.sigmoid(f[t]) if eigenvalues == "[0,1]" else 2 * torch.sigmoid(f[t]) - 1
        write = torch.sigmoid(i[t])[:, None] * k[t] / 32**0.5
        C = gate[:, None, None] * C + write[:, :, None] * v[t][:, None, :]
        h = torch.stack([C[n].T @ q[t, n] for n in range(2)])
        h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        h = h.flatten() * mixer.norm.weight + mixer.skip * skipped[t]
        torch.testing.assert_close(y[0, t], mixer.to_out.weight @ (h * z[t] * torch.sigmoid(z[t])))


def test_a_signed_mlstm_says_so_and_starts_with_gates_of_both_signs():
    torch.manual_seed(0)
    mixer = build("mlstm", vocab_size=VOCABULARY, d_model=WIDTH, eigenvalues="[-1,1]").blocks[0].mixer
    assert "eigenvalues=[-1,1], heads=4, normaliser=True" in str(mixer)
    gates = mixer.transition_eigenvalues(torch.randn(4, 50, WIDTH))
    assert gates.min() < -0.3
    assert gates.max() > 0.3
    with pytest.raises(UserError, match="MLSTM: eigenvalues is"):
        MLSTMConfig(eigenvalues="unit-circle").build(WIDTH, 1)
