"""The backbone around the mixers."""

import pytest
import torch
import torch.nn.functional as F

from statetrack.layers import Model, model_config
from statetrack.tasks import IGNORE, answer_positions, task


@pytest.mark.parametrize("preset", ["deltanet", "mamba", "transformer", "slstm", "diagonal-toy"])
def test_logits_at_some_positions_are_those_of_all_positions(preset):
    torch.manual_seed(0)
    model = Model(model_config(preset, layers=2), 7, 5)
    tokens = torch.randint(7, (3, 11))
    at = torch.tensor([[0, 10], [4, 4], [9, 2]])
    whole, _ = model(tokens)
    wanted = whole.gather(1, at[..., None].expand(-1, -1, 5))
    some, _ = model(tokens, at=at)
    torch.testing.assert_close(some, wanted)
    weight = torch.randn_like(some)
    expected = torch.autograd.grad((wanted * weight).sum(), list(model.parameters()))
    found = torch.autograd.grad((some * weight).sum(), list(model.parameters()))
    for name, a, b in zip(dict(model.named_parameters()), found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", ["parity", "mod-arithmetic", "mod-arithmetic-brackets"])
def test_the_loss_of_a_last_position_task_counts_its_answers_and_nothing_else(name):
    batch = task(name).sample(64, (5, 20), torch.Generator().manual_seed(0))
    at = answer_positions(batch.targets)
    assert (batch.targets.gather(1, at) != IGNORE).all()
    assert (batch.targets != IGNORE).sum() == 64
    logits = torch.randn(*batch.targets.shape, task(name).n_classes)
    whole = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
    answers = logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))[:, 0]
    torch.testing.assert_close(F.cross_entropy(answers, batch.targets.gather(1, at)[:, 0]), whole)
