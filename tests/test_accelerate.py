"""Linear layers of transformers on our ops: the same logits and text, and nothing left after the end."""

import copy

import pytest
import torch
from torch import nn

import statetrack
from statetrack.errors import UserError

transformers = pytest.importorskip("transformers")

VOCABULARY = 40
TOKENS = torch.randint(VOCABULARY, (2, 130), generator=torch.Generator().manual_seed(0))
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SHARED = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY, **NO_TOKENS}
DELTA = {
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
}
MODELS = {
    "olmo_hybrid": DELTA | {"linear_num_value_heads": 2},
    "qwen3_next": DELTA
    | {"linear_num_value_heads": 4, "head_dim": 8, "num_experts": 0, "mlp_only_layers": [0, 1]},
    "qwen3_5_text": DELTA | {"linear_num_value_heads": 4, "head_dim": 8},
    "mamba": {},
    "falcon_mamba": {},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    try:
        config = transformers.AutoConfig.for_model(request.param, **SHARED, **MODELS[request.param])
    except ValueError:
        pytest.skip(f"this version of transformers has no {request.param}")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=0.5)
        for name, parameter in model.named_parameters():
            if name.endswith(("proj.weight", "proj_qkvz.weight", "proj_ba.weight")):
                parameter.normal_(std=0.2)
    return model


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_logits_and_text_are_those_of_transformers(model):
    expected = model(TOKENS).logits
    text = model.generate(TOKENS[:, :20], max_new_tokens=8, do_sample=False)
    with statetrack.accelerate(model) as acceleration:
        assert acceleration.layers
        accelerated = model(TOKENS).logits
        assert not torch.equal(accelerated, expected)  # so it is another computation
        close(accelerated, expected)
        assert torch.equal(model.generate(TOKENS[:, :20], max_new_tokens=8, do_sample=False), text)
    assert torch.equal(model(TOKENS).logits, expected)


@torch.no_grad()
def test_rows_padded_on_the_left_stay_equal(model):
    mask = torch.ones(2, 130, dtype=torch.long)
    mask[0, :40] = 0
    expected = model(TOKENS, attention_mask=mask).logits
    with statetrack.accelerate(model):
        close(model(TOKENS, attention_mask=mask).logits[mask == 1], expected[mask == 1])


@torch.no_grad()
def test_a_prompt_in_two_parts_continues_from_the_cache(model):
    if "mamba" in model.config.model_type:
        pytest.skip("Mamba of transformers takes one token after a prompt, not several")
    with statetrack.accelerate(model):
        first = model(TOKENS[:, :70], use_cache=True)
        second = model(TOKENS[:, 70:], past_key_values=first.past_key_values)
        close(torch.cat([first.logits, second.logits], 1), model(TOKENS).logits)


def test_gradients_are_those_of_transformers(model):
    def gradients():
        model.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    with statetrack.accelerate(model):
        actual = gradients()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_only_this_model_is_changed_and_undo_gives_its_layers_back(model):
    other = copy.deepcopy(model)
    acceleration = statetrack.accelerate(model)
    own = [name for name, layer in model.named_modules() if "forward" in vars(layer)]
    assert own == acceleration.layers
    assert own[0] in repr(acceleration)
    assert not any("forward" in vars(layer) for layer in other.modules())
    with pytest.raises(UserError, match="has a `forward` of its own"):
        statetrack.accelerate(model)
    acceleration.undo()
    acceleration.undo()
    assert not any("forward" in vars(layer) for layer in model.modules())


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(UserError, match="Linear has no layer that this library can run"):
        statetrack.accelerate(nn.Linear(2, 2))
