"""The recorded step of AdamW is that of PyTorch, clipping and state included."""

import copy

import pytest
import torch

from statetrack.ops.adamw import recorded_adamw
from statetrack.ops.adamw.triton import backend
from statetrack.ops.adamw.triton.backend import refuses

SHAPES = [(24, 60), (3,), (10, 24), (1, 1), (1100,)]


def optimizer(dtype=torch.float32, **changes):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    groups = [{"params": weights[:3], "weight_decay": 0.1}, {"params": weights[3:], "weight_decay": 0.0}]
    options = {"lr": torch.tensor(1e-2), "betas": (0.9, 0.95), "eps": 1e-8, "fused": True} | changes
    return torch.optim.AdamW(groups, **options)


def weights_of(chosen):
    return [p for group in chosen.param_groups for p in group["params"]]


def set_gradients(chosen, step, size=1.0):
    generator = torch.Generator().manual_seed(step)
    for p in weights_of(chosen):
        p.grad = size * torch.randn(p.shape, generator=generator).to(p.dtype)


@pytest.mark.parametrize(("clip", "size"), [(0.0, 1.0), (1.0, 1.0), (1.0, 1e-3)])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_steps_are_those_of_pytorch(clip, size, betas):
    _compare(clip, size, betas)


def test_the_norm_of_a_large_model_is_summed_once(monkeypatch):
    monkeypatch.setattr(backend, "SUMMED_BY_ALL", 4)
    monkeypatch.setattr(backend, "TOTAL_BLOCK", 4)
    _compare(1.0, 1.0, (0.9, 0.95))


def _compare(clip, size, betas):
    theirs = optimizer(betas=betas)
    set_gradients(theirs, 0, size)
    theirs.step()
    ours = copy.deepcopy(theirs)
    for group in ours.param_groups:
        group["lr"] = ours.param_groups[0]["lr"]
    recorded = recorded_adamw(ours, clip)
    for step in range(1, 9):
        for chosen in (theirs, ours):
            set_gradients(chosen, step, size)
        if clip:
            torch.nn.utils.clip_grad_norm_(weights_of(theirs), clip)
        theirs.step()
        recorded.launch()
    torch.testing.assert_close(weights_of(ours), weights_of(theirs), rtol=1e-5, atol=1e-6)
    ours_state, theirs_state = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert ours_state.keys() == theirs_state.keys()
    for index in theirs_state:
        torch.testing.assert_close(ours_state[index], theirs_state[index], rtol=1e-5, atol=1e-7 * size)


def test_the_norm_is_that_of_the_last_gradients_before_clipping():
    chosen = optimizer()
    set_gradients(chosen, 0)
    chosen.step()
    recorded = recorded_adamw(chosen, 1.0)
    set_gradients(chosen, 1, 3.0)
    recorded.launch()
    set_gradients(chosen, 2, 5.0)
    weights_of(chosen)[-1].grad = None  # the last of the table: what it left there does not count
    recorded.launch()
    kept = [p.grad for p in weights_of(chosen) if p.grad is not None]
    torch.testing.assert_close(recorded.norm(), torch.nn.utils.get_total_norm(kept))


def test_a_weight_without_gradient_stays():
    chosen = optimizer()
    set_gradients(chosen, 0)
    chosen.step()
    kept = weights_of(chosen)[2]
    before, kept.grad = kept.detach().clone(), None
    recorded_adamw(chosen, 1.0).launch()
    torch.testing.assert_close(kept.detach(), before, rtol=0, atol=0)
    assert [chosen.state[p]["step"].item() for p in weights_of(chosen)] == [2, 2, 1, 2, 2]


def test_what_it_cannot_take_is_left_to_pytorch():
    assert "has not taken a step" in refuses(optimizer())
    for changes, reason in (({"amsgrad": True}, "amsgrad"), ({"dtype": torch.float64}, "float32")):
        chosen = optimizer(**changes)
        set_gradients(chosen, 0)
        chosen.step()
        assert reason in refuses(chosen)
        assert recorded_adamw(chosen, 1.0) is None


def test_a_gradient_that_is_nan_reaches_every_weight_by_the_clipping():
    """As with `clip_grad_norm_`: the others must not take a step that nothing has clipped."""
    chosen = optimizer()
    set_gradients(chosen, 0)
    chosen.step()
    weights_of(chosen)[1].grad[0] = float("nan")
    recorded_adamw(chosen, 1.0).launch()
    assert all(p.isnan().all() for p in weights_of(chosen))


def test_weights_without_elements_and_steps_without_gradients_are_taken():
    full, empty = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(0, 4))
    chosen = torch.optim.AdamW([full, empty], lr=torch.tensor(0.1), fused=True)
    full.grad, empty.grad = torch.ones(3), torch.zeros(0, 4)
    chosen.step()
    after_one = full.detach().clone()
    recorded_adamw(chosen, 1.0).launch()
    assert (full < after_one).all()
    after_two = full.detach().clone()
    full.grad = empty.grad = None
    recorded_adamw(chosen, 1.0).launch()
    assert torch.equal(full, after_two)
