"""Causal attention with rotary positions and a cache of keys and values."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.layers import AttentionConfig, build
from statetrack.layers.attention import rotate
from statetrack.layers.mixer import Packing


def test_attention_is_the_causal_softmax_average():
    torch.manual_seed(0)
    mixer = AttentionConfig(heads=2).build(8, 1).double()
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    q, k, v = mixer.to_qkv(x).chunk(3, dim=-1)
    heads = []
    for columns in (slice(0, 4), slice(4, 8)):
        q_h, k_h = (rotate(y[..., columns], 0, 10_000.0) for y in (q, k))
        scores = (q_h @ k_h.mT / 2).masked_fill(torch.ones(7, 7).triu(1) > 0, -torch.inf)
        heads.append(scores.softmax(-1) @ v[..., columns])
    torch.testing.assert_close(mixer(x)[0], mixer.to_out(torch.cat(heads, -1)))


def test_rotated_products_depend_on_the_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)
    products = [rotate(q, t, 10_000.0) @ rotate(k, t - 5, 10_000.0).mT for t in (5, 6, 300)]
    torch.testing.assert_close(products[1:], products[:1] * 2)
    assert not torch.allclose(products[0], q @ k.mT)


def test_rotation_of_two_channels_is_the_textbook_one():
    turned = rotate(torch.tensor([[1.0, 0.0]]), 1, 10_000.0)
    torch.testing.assert_close(turned, torch.tensor([[1.0, 0.0]]).new_tensor([[0.540302, 0.841471]]))


def test_the_state_holds_all_keys_and_values():
    model = build("transformer", vocab_size=5, d_model=16)
    _, (state,) = model(torch.zeros(3, 6, dtype=torch.long))
    assert state.k.shape == state.v.shape == (3, 4, 6, 4)


def test_attention_has_no_spectrum_and_says_so():
    with pytest.raises(UserError, match="no state transition"):
        build("transformer", vocab_size=5, d_model=16).transition_eigenvalues(torch.zeros(1, 3).long())


def test_heads_of_odd_width_are_refused():
    with pytest.raises(UserError, match="a head is 3 wide, expected an even width"):
        build("transformer", vocab_size=5, d_model=12)


OPTIONS = {
    "grouped keys": AttentionConfig(4, kv_heads=2),
    "norms of q and k": AttentionConfig(2, qk_norm=True),
    "no positions": AttentionConfig(2, positions=False),
}


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_options_of_attention_hold_in_pieces_and_packed(case, norm):
    torch.manual_seed(0)
    model = build("transformer", vocab_size=7, d_model=16, layers=2, mixer=OPTIONS[case], attention_norm=norm)
    tokens = torch.randint(7, (1, 11))
    whole, _ = model(tokens)
    first, state = model(tokens[:, :4])
    second, _ = model(tokens[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    packing = Packing(torch.tensor([0, 4, 15]), 11)
    packed, _ = model(torch.cat([tokens[:, :4], tokens], 1), packing=packing)
    torch.testing.assert_close(packed, torch.cat([first, whole], 1))


def test_grouped_keys_are_keys_repeated_for_each_query_of_the_group():
    torch.manual_seed(0)
    grouped, full = AttentionConfig(4, kv_heads=2).build(16, 1), AttentionConfig(4).build(16, 1)
    q, k, v = grouped.to_qkv.weight.detach().split((16, 8, 8))
    k, v = (y.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1) for y in (k, v))
    full.load_state_dict({"to_qkv.weight": torch.cat([q, k, v]), "to_out.weight": grouped.to_out.weight})
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(grouped(x)[0], full(x)[0])


def test_the_norms_of_q_and_k_span_all_heads():
    mixer = AttentionConfig(2, positions=False, qk_norm=True).build(4, 1)
    q, _, _ = mixer._heads(torch.tensor([[[2.0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]]]))
    torch.testing.assert_close(q.flatten(), torch.tensor([2.0, 0, 0, 0]))


def test_post_norms_stand_behind_attention_and_mlp_of_attention_layers_only():
    torch.manual_seed(0)
    model = build("deltanet", vocab_size=5, d_model=16, layers=2, attention_every=2, attention_norm="post")
    recurrent, attention = model.blocks
    x = torch.randn(1, 3, 16)
    y = x + attention.mixer_norm(attention.mixer(x)[0])
    y = y + attention.mlp_norm(attention.mlp(y))
    torch.testing.assert_close(sum(attention(x)[:2]), y)
    y = x + recurrent.mixer(recurrent.mixer_norm(x))[0]
    y = y + recurrent.mlp(recurrent.mlp_norm(y))
    torch.testing.assert_close(sum(recurrent(x)[:2]), y)


@pytest.mark.parametrize("options", [{"kv_heads": 3}, {"kv_heads": 0}, {"qk_norm_eps": 0.0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(UserError, match=next(iter(options))):
        AttentionConfig(4, **options).build(16, 1)
