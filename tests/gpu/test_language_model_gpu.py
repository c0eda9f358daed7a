"""Language models on a GPU: tied weights and recomputed blocks in a CUDA graph, and packed prefill."""

from dataclasses import replace

import pytest
import torch

from statetrack.layers import build, model_config
from statetrack.layers.mixer import Packing
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import task
from statetrack.training.graph_step import GraphStep
from statetrack.training.source import source_of
from statetrack.training.state import new_state

pytestmark = pytest.mark.gpu

LENGTHS = [70, 1, 2, 130, 64]
TIED = RunSpec(
    task("s5-swaps"),
    model_config("deltanet", layers=2, tied=True),
    TrainingConfig(steps=60, batch=64, precision="bfloat16"),
    EvaluationConfig(eval_samples=64, eval_batch=64),
)


def losses(spec, graphs, recompute=False):
    """The loss of every step."""
    device = torch.device("cuda")
    state = new_state(spec, device)
    state.model.checkpoint_activations = recompute
    step, found = GraphStep(spec, state, source_of(spec, device), pytest.fail, graphs), []
    with step.on_stream():
        for _ in range(spec.training.steps):
            step()
            found.append(state.loss_sum.item())
            state.loss_sum.zero_()
    assert bool(step.graphs) == graphs
    assert state.model.head.weight is state.model.embedding.weight
    return torch.tensor(found)


def test_captured_steps_of_a_tied_model_are_eager_steps_under_autocast():
    """The graph has bfloat16 copies of weights and its own AdamW, the eager steps have neither."""
    spec = TIED.resolved()
    torch.testing.assert_close(losses(spec, True), losses(spec, False), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "captured"])
def test_recomputed_blocks_train_as_kept_ones(graphs):
    spec = TIED.resolved()
    spec = replace(spec, training=replace(spec.training, steps=20))
    torch.testing.assert_close(losses(spec, graphs, True), losses(spec, graphs), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deltanet", {}),
        ("gated-deltanet", {}),
        ("deltaproduct", {}),
        ("mamba", {}),
        ("deltanet", {"attention_every": 2}),
    ],
)
def test_decoding_goes_on_from_a_packed_prefill_as_from_each_sequence_alone(name, changes):
    torch.manual_seed(0)
    model = build(name, vocab_size=50, layers=2, **changes).cuda()
    prompts = [torch.randint(50, (1, length), device="cuda") for length in LENGTHS]
    following = torch.randint(50, (len(LENGTHS), 3), device="cuda")
    bounds = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0)
    with torch.no_grad():
        packing = Packing(bounds, max(LENGTHS))
        logits, states = model(torch.cat(prompts, dim=1), packing=packing, packed_states=True)
        decoded, states = model(following[:, :1], states)
        rest, _ = model(following[:, 1:], states)
        decoded = torch.cat([decoded, rest], dim=1)
        for i, prompt in enumerate(prompts):
            expected, _ = model(torch.cat([prompt, following[i : i + 1]], dim=1))
            found = torch.cat([logits[0, bounds[i] : bounds[i + 1]], decoded[i]])
            torch.testing.assert_close(found, expected[0], rtol=1e-3, atol=1e-3)
