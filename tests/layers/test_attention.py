"""Causal attention with rotary positions and a cache of keys and values."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.layers import AttentionConfig, build
from statetrack.layers.attention import rotate


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
