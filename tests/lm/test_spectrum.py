"""The use of the negative half: right fractions, the same in any windows, per layer and unit."""

import numpy as np
import pytest
import torch
from random_shards import random_shards

from statetrack.errors import UserError
from statetrack.layers import AttentionConfig, DeltaNetConfig, ModelConfig, build
from statetrack.layers.model import Model
from statetrack.lm.layout import bin_edges, layout_of
from statetrack.lm.perplexity import WindowReader
from statetrack.lm.spectrum import QUANTILES, spectrum_table, spectrum_use

LENGTH = 40


@pytest.fixture
def shards(tmp_path):
    return random_shards(tmp_path, {"heldout-a": [30, 70], "heldout-b": [50]})


def use(model, shards, **reader):
    places = {s: layout_of(shards.documents(s), bin_edges(LENGTH, 1)) for s in shards.splits}
    return spectrum_use(model, shards, places, WindowReader(**reader))


def tiny(name, **changes):
    torch.manual_seed(0)
    model = build(name, 11, d_model=16, layers=2, **changes)
    with torch.no_grad():
        for p in model.parameters():  # gates well away from their initial values
            p.add_(0.3 * torch.randn_like(p))
    return model


def tokens_of(shards, split):
    starts = range(0, shards.tokens(split) - 1 - LENGTH + 1, LENGTH)
    return torch.from_numpy(np.stack([shards.read(split, s, LENGTH) for s in starts]).astype(np.int64))


@pytest.mark.parametrize("window", [7, LENGTH])
def test_heads_of_deltanet_are_counted_as_in_one_pass(shards, window):
    model = tiny("deltanet", heads=2)
    found = {(u.split, u.layer): u for u in use(model, shards, window=window, batch=2)}
    assert sorted(found) == [(s, layer) for s in ("heldout-a", "heldout-b") for layer in (0, 1)]
    for (split, layer), one in found.items():
        values = model.transition_eigenvalues(tokens_of(shards, split))[layer][..., 0]  # (B, T, H)
        values = values.flatten(0, 1)
        assert one.count == len(values)
        assert one.negative == pytest.approx((values < 0).float().mean(0).tolist())
        assert one.negative_part == pytest.approx(values.clamp(max=0).mean(0).tolist(), abs=1e-5)
        for head, quantiles in enumerate(one.quantiles):
            exact = np.quantile(values[:, head].numpy(), QUANTILES, method="inverted_cdf")
            assert quantiles == pytest.approx(exact.tolist(), abs=0.006)
    assert 0 < min(min(one.negative) for one in found.values()) < 1


def test_states_of_mamba_are_counted_over_channels(shards):
    model = tiny("mamba", d_state=3)
    values = model.transition_eigenvalues(tokens_of(shards, "heldout-b"))[1].flatten(0, 2)  # (..., N)
    one = use(model, shards, window=16)[-1]
    assert one.negative == pytest.approx((values < 0).float().mean(0).tolist(), abs=1e-3)


def test_a_model_of_the_positive_range_uses_nothing_of_the_negative_half(shards):
    for one in use(tiny("deltanet", heads=2, eigenvalues="[0,1]"), shards):
        assert one.negative == one.negative_part == (0.0, 0.0)
        assert min(min(row) for row in one.quantiles) > 0


def test_attention_layers_are_left_out(shards):
    mixers = (DeltaNetConfig(heads=2), AttentionConfig(heads=2))
    found = use(Model(ModelConfig(mixers=mixers, d_model=16, layers=4), 11, 11), shards, window=9)
    assert [u.layer for u in found if u.split == "heldout-a"] == [0, 2]
    with pytest.raises(UserError, match="attention in every layer"):
        use(build("transformer", 11, d_model=16), shards)


def test_the_model_is_left_without_hooks(shards):
    model = tiny("deltanet", heads=2)
    use(model, shards)
    assert not any(block.mixer._forward_pre_hooks for block in model.blocks)


def test_the_table_has_a_line_per_split_and_layer(shards):
    lines = spectrum_table(use(tiny("deltanet", heads=2), shards)).splitlines()
    assert len(lines) == 1 + 4
    assert lines[1].split()[:3] == ["heldout-a", "1", "2"]
