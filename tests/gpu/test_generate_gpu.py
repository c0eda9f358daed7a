"""A token decoded by a CUDA graph is the token decoded by separate launches."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.layers import AttentionConfig, DeltaNetConfig, MambaConfig, Model, ModelConfig
from statetrack.lm.generate import Sampling, generate

pytestmark = pytest.mark.gpu

MIXERS = {"deltanet": DeltaNetConfig(2), "gated": DeltaNetConfig(2, gated=True), "mamba": MambaConfig()}


def model(mixer) -> Model:
    torch.manual_seed(0)
    return Model(ModelConfig(mixer, d_model=64, layers=2, mlp_ratio=2), 50, 50).cuda().eval()


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_graph_decodes_the_same_tokens(mixer, batch):
    lm = model(MIXERS[mixer])
    tokens = torch.randint(50, (batch, 9), device="cuda")
    expected = generate(lm, tokens, 20)
    assert torch.equal(generate(lm, tokens, 20, graph=True), expected)
    sampled = [
        generate(lm, tokens, 20, Sampling(), generator=torch.Generator("cuda").manual_seed(1), graph=graph)
        for graph in (False, True)
    ]
    assert torch.equal(*sampled)


def test_a_state_that_grows_is_refused():
    with pytest.raises(UserError, match="grows with the tokens"):
        generate(model(AttentionConfig(2)), torch.ones(1, 3, dtype=torch.long, device="cuda"), 5, graph=True)
