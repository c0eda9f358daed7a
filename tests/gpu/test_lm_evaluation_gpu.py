"""Loss by position and the use of the spectrum on a GPU are those of a CPU."""

import numpy as np
import pytest
import torch

from statetrack.layers import build
from statetrack.lm.layout import bin_edges, layout_of
from statetrack.lm.perplexity import WindowReader, measure
from statetrack.lm.shards import write_shards
from statetrack.lm.spectrum import spectrum_use

pytestmark = pytest.mark.gpu


@pytest.fixture
def shards(tmp_path):
    generator = np.random.default_rng(0)
    documents = [generator.integers(500, size=n).tolist() for n in (700, 300, 2000)]
    return write_shards(tmp_path, {"heldout": documents}, 501, 500)


@pytest.mark.parametrize("mixer", ["deltanet", "mamba"])
def test_both_devices_agree(shards, mixer):
    torch.manual_seed(0)
    model = build(mixer, 501, d_model=128, layers=2)
    places = {"heldout": layout_of(shards.documents("heldout"), bin_edges(1000, 10))}
    readers = [WindowReader(window=256, batch=2, device=torch.device(name)) for name in ("cpu", "cuda")]
    cpu, gpu = (measure(model, shards, places, reader)["heldout"] for reader in readers)
    np.testing.assert_allclose(gpu, cpu, rtol=1e-4)
    rounded = measure(model, shards, places, WindowReader(256, 2, "bfloat16", torch.device("cuda")))
    np.testing.assert_allclose(rounded["heldout"], cpu, rtol=0.03)
    ours, theirs = (spectrum_use(model, shards, places, reader) for reader in readers)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.negative, other.negative, atol=2e-3)
        np.testing.assert_allclose(one.quantiles, other.quantiles, atol=0.011)
