"""On a GPU, where fusion is on by default, changed modules take effect."""

import copy

import pytest
import torch
from module_changes import CHANGES, change, weighted_modules

from statetrack.layers import build
from statetrack.layers.fusion import fused

pytestmark = pytest.mark.gpu

PRESETS = ("deltanet", "deltanet-no-conv", "gated-deltanet", "deltaproduct", "mamba", "transformer")
# 64 tokens and 16 channels to a head: what the kernels of the delta rule take
TOKENS = torch.randint(11, (2, 64), generator=torch.Generator().manual_seed(0))


def small(preset):
    torch.manual_seed(0)
    heads = {} if preset == "mamba" else {"heads": 2}
    model = build(preset, vocab_size=11, d_model=32, **heads).cuda()
    for p in model.parameters():
        p.data.mul_(2).add_(torch.randn_like(p), alpha=0.05)
    return model


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("preset", PRESETS)
@torch.no_grad()
def test_a_changed_module_takes_effect_once(preset, how):
    model, tokens = small(preset), TOKENS.cuda()
    for name in weighted_modules(model):
        changed = copy.deepcopy(model)
        calls = change(changed, name, how)
        actual = changed(tokens)[0]
        assert len(calls) == 1, name
        with fused(False):
            expected = changed(tokens)[0]
        assert (expected - actual).abs().max() < 1e-3 * expected.abs().max(), name
