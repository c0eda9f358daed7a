"""Mixers against the implementations of transformers, on the same weights."""

import importlib
from dataclasses import replace

import pytest
import torch

from statetrack.layers import AttentionConfig, DeltaNetConfig, build
from statetrack.layers.attention import rotate
from statetrack.layers.fusion import fused
from statetrack.layers.mlp import SwiGLU


def test_mamba_logits_equal_those_of_transformers_on_the_same_weights():
    from transformers import MambaConfig as HFConfig
    from transformers import MambaForCausalLM

    torch.manual_seed(0)
    config = HFConfig(vocab_size=50, hidden_size=32, num_hidden_layers=3, state_size=8, use_mambapy=False)
    theirs = MambaForCausalLM(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.05 * torch.randn_like(p))
    ours = build("mamba", vocab_size=50, d_model=32, layers=3, d_state=8, eigenvalues="[0,1]")
    renamed = {}
    for name, p in theirs.state_dict().items():
        name = name.replace("backbone.embeddings", "embedding").replace("backbone.norm_f", "norm")
        name = name.replace("backbone.layers", "blocks").replace("lm_head", "head")
        renamed[name.replace(".norm.", ".mixer_norm.")] = p
    ours.load_state_dict(renamed)
    ids = torch.randint(50, (2, 37), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], theirs(ids).logits, rtol=1e-4, atol=1e-4)


def published_gated_deltanet():
    """A Gated DeltaNet of Qwen3-Next: width 24, 2 heads with keys of 6 and values of 10 channels."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=24,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=6,
        linear_value_head_dim=10,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-5,
    )
    theirs = Qwen3NextGatedDeltaNet(config, layer_idx=0)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return theirs


def under_our_names(theirs, tensor):
    """Weights of Qwen3-Next, or their gradients (`tensor` picks one), as our layer names and orders them."""
    heads, K, V = theirs.num_k_heads, theirs.head_k_dim, theirs.head_v_dim
    by_head = tensor(theirs.in_proj_qkvz.weight).unflatten(0, (heads, -1)).split([K, K, V, V], dim=1)
    linears = ("to_q", "to_k", "to_v", "output_gate")
    ours = {f"{name}.weight": w.flatten(0, 1) for name, w in zip(linears, by_head, strict=True)}
    gates = tensor(theirs.in_proj_ba.weight).unflatten(0, (heads, 2)).unbind(1)
    ours |= {"to_beta.weight": gates[0], "to_decay.weight": gates[1]}
    taps = tensor(theirs.conv1d.weight).split([heads * K, heads * K, heads * V])
    ours |= {f"convolutions.{i}.weight": w for i, w in enumerate(taps)}
    ours |= {"A_log": tensor(theirs.A_log), "decay_bias": tensor(theirs.dt_bias)}
    return ours | {"norm.weight": tensor(theirs.norm.weight), "to_out.weight": tensor(theirs.out_proj.weight)}


def signed_rule(rule):
    """The published rule with the gate 2 exp(g) - 1 and twice the beta: signs go into queries and keys."""

    def run(q, k, v, g, beta, **options):
        a = 2 * g.exp() - 1
        c = a.detach().sign().cumprod(1)[..., None]
        return rule(q * c, k * c, v, g=a.abs().log(), beta=2 * beta, **options)

    return run


@pytest.mark.parametrize("signed", [False, True])
def test_gated_deltanet_is_that_of_qwen3_next_with_all_gradients(signed, monkeypatch):
    torch.manual_seed(0)
    theirs = published_gated_deltanet()
    config = DeltaNetConfig(
        heads=2, head_dim=6, value_dim=10, eigenvalues="[0,1]", gated=True, output_gate=True
    )
    if signed:
        published = importlib.import_module(type(theirs).__module__)
        rule = "torch_chunk_gated_delta_rule"
        monkeypatch.setattr(published, rule, signed_rule(getattr(published, rule)))
        config = replace(config, eigenvalues="[-1,1]", signed_gate=True)
    ours = config.build(24, 1)
    ours.load_state_dict(under_our_names(theirs, lambda p: p.data))
    x, weight = torch.randn(2, 2, 75, 24)  # their chunks hold 64 steps
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected, (actual, _) = theirs(inputs[0]), ours(inputs[1])
    (expected * weight).sum().backward()
    (actual * weight).sum().backward()
    reference = under_our_names(theirs, lambda p: p.grad) | {"x": inputs[0].grad, "y": expected}
    found = {name: p.grad for name, p in ours.named_parameters()} | {"x": inputs[1].grad, "y": actual}
    assert found.keys() == reference.keys()
    for name, tensor in reference.items():
        # relative to the largest entry: theirs computes in float32 throughout, in another order
        assert (found[name] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), name
    if signed:
        assert ours.transition_eigenvalues(x).min() < -0.5


def published_attention(base):
    """The attention of Llama, width 24 in 3 heads, with a function that gives the angles of positions."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=24,
        num_attention_heads=3,
        num_key_value_heads=3,
        rope_parameters={"rope_type": "default", "rope_theta": base},
        attn_implementation="sdpa",
    )
    return LlamaAttention(config, layer_idx=0).eval(), LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("past", [0, 1, 100])
@pytest.mark.parametrize("base", [10_000.0, 500.0])
def test_rotary_positions_are_those_of_llama(past, base):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    _, angles = published_attention(base)
    q, k = torch.randn(2, 2, 3, 9, 8, generator=torch.Generator().manual_seed(0))  # (B, H, T, K) each
    cos, sin = angles(q, torch.arange(past, past + 9)[None])
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    actual = rotate(q, past, base), rotate(k, past, base)
    # their angles are products in float32, off by 1e-5 at position 100
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("base", [10_000.0, 500.0])
def test_attention_is_that_of_llama_in_one_pass_and_in_pieces(base):
    torch.manual_seed(0)
    theirs, angles = published_attention(base)
    ours = AttentionConfig(heads=3, rotary_base=base).build(24, 1)
    projections = theirs.q_proj, theirs.k_proj, theirs.v_proj
    with torch.no_grad():
        for linear in (*projections, theirs.o_proj):
            linear.weight.mul_(4)  # so that attention is far from uniform
        ours.to_qkv.weight.copy_(torch.cat([linear.weight for linear in projections]))
        ours.to_out.weight.copy_(theirs.o_proj.weight)
        x = torch.randn(2, 11, 24)
        expected, _ = theirs(x, angles(x, torch.arange(11)[None]))
        first, state = ours(x[:, :4])
        rest, _ = ours(x[:, 4:], state)
        torch.testing.assert_close(ours(x)[0], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.cat([first, rest], dim=1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("choice", [None, True], ids=["default", "fused"])
def test_the_mlp_is_that_of_llama(choice):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    theirs = LlamaMLP(LlamaConfig(hidden_size=24, intermediate_size=36, num_attention_heads=3))
    ours = SwiGLU(24, 1.5, layers=1)
    for name, p in ours.named_parameters():
        p.data.copy_(theirs.get_parameter(name.replace(".", "_proj.")))
    x = torch.randn(2, 5, 24)
    with fused(choice):
        torch.testing.assert_close(ours(x), theirs(x))
