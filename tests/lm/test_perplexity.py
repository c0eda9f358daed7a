"""Loss by position: the same in windows of any size, in constant memory, and right where it is known."""

import json
import math

import numpy as np
import pytest
import torch
from random_shards import random_shards
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from statetrack.errors import UserError
from statetrack.layers import build
from statetrack.lm.layout import bin_edges, layout_of
from statetrack.lm.measured import Measured, Perplexities, merge, read_perplexities, write_perplexities
from statetrack.lm.perplexity import WindowReader, measure, token_losses

MIXERS = ("deltanet", "mamba", "transformer")


def tiny(name="deltanet", vocab_size=11, **changes):
    torch.manual_seed(0)
    model = build(name, vocab_size, d_model=16, layers=2, **changes)
    with torch.no_grad():
        model.head.weight.mul_(50)  # losses that differ from those of a uniform guess
    return model


def layouts(shards, length, bins=4, **options):
    return {s: layout_of(shards.documents(s), bin_edges(length, bins), **options) for s in shards.splits}


@pytest.fixture
def shards(tmp_path):
    return random_shards(tmp_path / "data", {"heldout-a": [30, 5, 1, 90, 40], "heldout-b": [70]})


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("window", [1, 7, 32, 1000])
def test_windows_of_any_size_give_the_losses_of_one_pass(shards, mixer, window):
    model, places = tiny(mixer), layouts(shards, 64)
    found = measure(model, shards, places, WindowReader(window=window, batch=2))
    for split, layout in places.items():
        for i, start in enumerate(layout.starts.tolist()):
            tokens = torch.from_numpy(shards.read(split, start, 65).astype(np.int64))[None]
            losses = cross_entropy(model(tokens[:, :-1])[0][0], tokens[0, 1:], reduction="none")
            cells = np.split(losses.detach().numpy(), layout.position[layout.cells_of(i)][1:])
            expected = [cell.sum() for cell in cells]
            np.testing.assert_allclose(found[split][layout.cells_of(i)], expected, rtol=1e-5, atol=1e-5)


def test_losses_do_not_depend_on_how_many_logits_are_held_at_once(monkeypatch):
    model, tokens = tiny(), torch.randint(11, (3, 20))
    whole, _ = token_losses(model, tokens)
    monkeypatch.setattr("statetrack.lm.perplexity.LOGITS", 11 * 4)
    torch.testing.assert_close(token_losses(model, tokens)[0], whole, rtol=1e-6, atol=1e-6)


class Largest(TorchDispatchMode):
    """The largest number of elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


@pytest.mark.parametrize("mixer", ["deltanet", "mamba"])
def test_no_tensor_grows_with_the_length(tmp_path, mixer):
    model = tiny(mixer)

    def largest(length):
        shards = random_shards(tmp_path / str(length), {"heldout": [2 * length + 1]})
        with Largest() as seen:
            measure(model, shards, layouts(shards, length), WindowReader(window=16, batch=2))
        return seen.elements

    assert largest(64) == largest(256) > 0


def test_a_model_of_zeros_has_the_perplexity_of_the_vocabulary(shards, tmp_path):
    model, places = tiny(vocab_size=13), layouts(shards, 60)
    with torch.no_grad():
        model.head.weight.zero_()
    losses = measure(model, shards, places, WindowReader(window=25))
    found = Perplexities(shards.sha256, "concatenated", places, (Measured("zeros", "zeros", losses),))
    for split in places:
        mean, error = found.by_position(found.models[0], split)
        np.testing.assert_allclose(np.exp(mean), 13, rtol=1e-6)
        assert np.isnan(error).all() if len(places[split].starts) == 1 else np.allclose(error, 0, atol=1e-6)
        assert found.mean_loss(found.models[0], split) == pytest.approx(math.log(13))
    write_perplexities(tmp_path / "perplexity.json", found)
    written = json.loads((tmp_path / "perplexity.json").read_text())
    assert written["models"][0]["splits"]["heldout-b"]["perplexity"] == pytest.approx(13)
    assert written["splits"]["heldout-a"]["sequences"] == 2


def test_means_and_standard_errors_by_hand(tmp_path):
    """Two sequences of 4 tokens in two bins: means 1 and 3, and 2 and 2."""
    layout = layout_of(np.array([0, 9]), bin_edges(4, 2))
    losses = {"heldout": np.array([2.0, 4.0, 6.0, 4.0])}
    found = Perplexities("", "concatenated", {"heldout": layout}, (Measured("a", "a", losses),))
    mean, error = found.by_position(found.models[0], "heldout")
    assert mean.tolist() == [2.0, 2.0]
    assert error.tolist() == [1.0, 0.0]
    assert found.mean_loss(found.models[0], "heldout", 0, 2) == 2.0
    with pytest.raises(UserError, match="not whole bins"):
        found.mean_loss(found.models[0], "heldout", 0, 3)


def test_bfloat16_is_close_to_float32(shards):
    places = layouts(shards, 64)
    exact, rounded = (
        measure(tiny(), shards, places, WindowReader(window=32, precision=p)) for p in ("float32", "bfloat16")
    )
    total = [sum(x.sum() for x in found.values()) for found in (exact, rounded)]
    assert total[0] != total[1]
    assert total[1] == pytest.approx(total[0], rel=0.01)


def test_files_are_read_back_as_they_were_written(shards, tmp_path):
    places = layouts(shards, 50, rows="long")
    losses = measure(tiny(), shards, places, WindowReader())
    model = Measured("id0", "DeltaNet [-1,1]", losses, seed=3, context=25, parameters=7)
    before = Perplexities(shards.sha256, "long", places, (model,), "bfloat16")
    write_perplexities(tmp_path / "p.json", before)
    after = read_perplexities(tmp_path / "p.json")
    assert (after.data, after.rows, after.precision) == (shards.sha256, "long", "bfloat16")
    for split, layout in places.items():
        for name in ("starts", "edges", "sequence", "document", "bin", "position", "tokens"):
            assert np.array_equal(getattr(after.layouts[split], name), getattr(layout, name)), name
        np.testing.assert_allclose(after.models[0].losses[split], losses[split], rtol=1e-7)
    assert [getattr(after.models[0], n) for n in ("id", "label", "seed", "context", "parameters")] == [
        "id0",
        "DeltaNet [-1,1]",
        3,
        25,
        7,
    ]


def test_losses_of_different_sequences_are_not_merged(shards):
    one, other = (
        Perplexities(shards.sha256, "concatenated", layouts(shards, length), ()) for length in (32, 64)
    )
    assert merge([one, one]).layouts is one.layouts
    with pytest.raises(UserError, match="different sequences"):
        merge([one, other])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "statetrack perplexity 1"}'])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(UserError, match=r"p\.json"):
        read_perplexities(tmp_path / "p.json")


def test_tokens_that_the_model_does_not_know_are_refused(shards):
    with pytest.raises(UserError, match="11 tokens and the model one of 5"):
        measure(tiny(vocab_size=5), shards, layouts(shards, 32), WindowReader())
