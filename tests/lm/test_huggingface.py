"""The wrapper in transformers gives what the backbone gives: logits, loss, generation, files."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F

from statetrack.errors import UserError
from statetrack.layers import (
    AttentionConfig,
    DeltaNetConfig,
    MambaConfig,
    Model,
    ModelConfig,
    SLSTMConfig,
    model_config,
)

transformers = pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from statetrack.integrations.huggingface import (  # noqa: E402
    StateCache,
    StateTrackConfig,
    StateTrackForCausalLM,
)

VOCABULARY = 40
BACKBONES = {
    "deltanet": ModelConfig(DeltaNetConfig(2), d_model=16, layers=2, mlp_ratio=2, tied=True),
    "mamba": ModelConfig(MambaConfig("[0,1]"), d_model=16, layers=2, mlp_ratio=0),
    "hybrid of recurrences": ModelConfig(
        mixers=(DeltaNetConfig(2, gated=True), MambaConfig(), SLSTMConfig(2)),
        d_model=16,
        layers=3,
        mlp_ratio=0,
    ),
    "hybrid with attention": ModelConfig(
        mixers=(DeltaNetConfig(2), AttentionConfig(2)), d_model=16, layers=2, mlp_ratio=0
    ),
}


def built(backbone: ModelConfig) -> StateTrackForCausalLM:
    torch.manual_seed(0)
    model = StateTrackForCausalLM(StateTrackConfig(backbone=backbone, vocab_size=VOCABULARY)).eval()
    with torch.no_grad():
        model.model.embedding.weight.mul_(20)  # small weights give logits that hardly depend on the past
    return model


@pytest.fixture(scope="module", params=BACKBONES)
def model(request):
    return built(BACKBONES[request.param])


@pytest.fixture(scope="module")
def deltanet():
    return built(BACKBONES["deltanet"])


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def padded_on_the_left(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(row) for row in rows)
    tokens = torch.stack([F.pad(row, (longest - len(row), 0), value=7) for row in rows])
    mask = torch.stack([F.pad(torch.ones_like(row), (longest - len(row), 0)) for row in rows])
    return tokens, mask


def test_initial_weights_are_those_of_the_backbone():
    backbone = BACKBONES["mamba"]
    torch.manual_seed(3)
    wrapper = StateTrackForCausalLM(StateTrackConfig(backbone=backbone, vocab_size=VOCABULARY))
    torch.manual_seed(3)
    expected = Model(backbone, VOCABULARY, VOCABULARY).state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in wrapper.model.state_dict().items())


def test_logits_are_those_of_the_backbone(model):
    tokens = random_tokens(2, 9)
    assert torch.equal(model(tokens).logits, model.model(tokens)[0])


@pytest.mark.parametrize(
    "keep", [1, 3, 100, torch.tensor([0, 4]), torch.tensor([[1, 2], [0, 8]]), torch.rand(2, 9) > 0.5]
)
def test_logits_to_keep_selects_positions(deltanet, keep):
    tokens = random_tokens(2, 9)
    full = deltanet(tokens).logits
    if isinstance(keep, int):
        expected = full[:, -keep:]
    elif keep.dtype == torch.bool:
        expected = full[keep]
    else:
        expected = torch.stack([row[at] for row, at in zip(full, keep.expand(2, -1), strict=True)])
    torch.testing.assert_close(deltanet(tokens, logits_to_keep=keep).logits, expected)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_generation_with_states_equals_generation_without(model, options):
    tokens = random_tokens(2, 7)
    options = {"max_new_tokens": 6, "pad_token_id": 0, **options}
    assert torch.equal(model.generate(tokens, **options), model.generate(tokens, use_cache=False, **options))


def test_sampling_with_states_equals_sampling_without(model):
    tokens = random_tokens(2, 7)
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        drawn.append(
            model.generate(
                tokens, do_sample=True, top_k=10, max_new_tokens=6, use_cache=use_cache, pad_token_id=0
            )
        )
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], model.generate(tokens, max_new_tokens=6, pad_token_id=0))


def test_a_batch_padded_on_the_left_generates_what_its_rows_do(model):
    rows = [random_tokens(5), random_tokens(11)[2:], random_tokens(8)[7:]]
    tokens, mask = padded_on_the_left(rows)
    for options in ({}, {"num_beams": 2}):
        options = {"max_new_tokens": 6, "pad_token_id": 7, **options}
        together = model.generate(tokens, attention_mask=mask, **options)
        for row, new in zip(rows, together[:, tokens.shape[1] :], strict=True):
            alone = model.generate(row[None], **options)
            assert torch.equal(new, alone[0, len(row) :])


@pytest.mark.parametrize("keep", [0, 2])
def test_padding_on_either_side_leaves_logits_as_they_are(model, keep):
    rows = [random_tokens(5), random_tokens(9)[2:]]
    tokens, mask = padded_on_the_left(rows)
    for x, m in ((tokens, mask), (tokens.flip(1), mask.flip(1))):
        for use_cache in (True, False):
            logits = model(x, attention_mask=m, logits_to_keep=keep, use_cache=use_cache).logits
            for b in range(2):
                real = m[b, -keep:].bool() if keep else m[b].bool()
                alone = model(x[b][m[b].bool()][None]).logits[0]
                start = int(m[b].bool()[: len(m[b]) - len(real)].sum())  # real tokens before those kept
                expected = alone[start : start + int(real.sum())]
                torch.testing.assert_close(logits[b][real], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_embedded_inputs_give_what_their_tokens_give(model, padded):
    tokens, mask = random_tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0 if padded else 1
    embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()
    given = {"attention_mask": mask}
    expected = model(tokens, **given).logits
    torch.testing.assert_close(model(inputs_embeds=embedded, **given).logits, expected)
    options = given | {"max_new_tokens": 5, "pad_token_id": 0, "num_beams": 2}
    text = model.generate(tokens, **options)[:, 9:]
    assert torch.equal(model.generate(inputs_embeds=embedded, **options), text)
    copy.deepcopy(model).train()(inputs_embeds=embedded, labels=tokens, **given).loss.backward()
    assert torch.equal(embedded.grad.abs().sum(-1)[:, :8] > 0, mask[:, :8].bool())


def test_a_conversation_goes_on_from_the_cache_of_its_last_turn(model):
    options = {"max_new_tokens": 5, "pad_token_id": 0}
    turn = model.generate(random_tokens(2, 7), return_dict_in_generate=True, **options)
    tokens = torch.cat([turn.sequences, random_tokens(2, 3)], dim=1)
    continued = model.generate(tokens, past_key_values=turn.past_key_values, **options)
    assert torch.equal(continued, model.generate(tokens, **options))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_prompt_read_in_parts_gives_the_same_text(model, size):
    tokens, mask = random_tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    options = {"max_new_tokens": 5, "pad_token_id": 0, "attention_mask": mask}
    for padding in (0, 2) if size > 2 else (0,):
        mask[0, :padding] = 0
        cache = StateCache(len(model.model.blocks))
        parts = model.generate(tokens, past_key_values=cache, prefill_chunk_size=size, **options)
        assert torch.equal(parts, model.generate(tokens, **options))
    mask[0, -1] = 0  # the last part, where parts are of 4, is one token of padding
    if size == 4:
        cache = StateCache(len(model.model.blocks))
        with pytest.raises(UserError, match="row 0 of attention_mask is all padding"):
            model.generate(tokens, past_key_values=cache, prefill_chunk_size=size, **options)


def test_the_arguments_that_adapters_pass_as_none_are_taken(deltanet):
    """As the forward of PEFT's PeftModelForCausalLM does."""
    tokens = random_tokens(2, 5)
    names = ("inputs_embeds", "output_attentions", "output_hidden_states", "return_dict", "position_ids")
    logits = deltanet(input_ids=tokens, **dict.fromkeys(names)).logits
    assert torch.equal(logits, deltanet(tokens).logits)


def test_the_loss_is_that_of_transformers_in_training_and_evaluation(model):
    tokens = random_tokens(2, 9)
    labels = tokens.masked_fill(torch.rand(2, 9, generator=torch.Generator().manual_seed(0)) < 0.3, -100)
    expected = transformers.loss.loss_utils.ForCausalLMLoss(model(tokens).logits, labels, VOCABULARY)
    training = copy.deepcopy(model).train()
    torch.testing.assert_close(model(tokens, labels=labels).loss, expected)
    torch.testing.assert_close(training(tokens, labels=labels).loss, expected)
    assert training(tokens, labels=labels).logits is None
    training.config.training_logits = True
    with_logits = training(tokens, labels=labels)
    torch.testing.assert_close(with_logits.loss, expected)
    torch.testing.assert_close(with_logits.logits, model(tokens).logits)
    training.config.training_logits = False
    by_number = training(tokens, labels=labels, num_items_in_batch=5).loss
    torch.testing.assert_close(by_number, expected * (labels[:, 1:] != -100).sum() / 5)


def test_padding_leaves_loss_and_gradients_as_they_are(model):
    rows = [random_tokens(5), random_tokens(9)[2:]]
    tokens, mask = padded_on_the_left(rows)
    losses, gradients = [], []
    for x, m in ((tokens, mask), (tokens.flip(1), mask.flip(1))):
        training = copy.deepcopy(model).train()
        loss = training(x, attention_mask=m, labels=x.masked_fill(m == 0, -100), num_items_in_batch=1).loss
        loss.backward()
        alone = copy.deepcopy(model).train()
        parts = [x[b][m[b].bool()][None] for b in range(2)]
        expected = sum(alone(part, labels=part, num_items_in_batch=1).loss for part in parts)
        expected.backward()
        losses.append((loss, expected))
        gradients += list(zip(training.parameters(), alone.parameters(), strict=True))
    for loss, expected in losses:
        torch.testing.assert_close(loss, expected)
    for p, q in gradients:
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


def test_a_cache_continues_where_it_stopped(model):
    tokens = random_tokens(2, 9)
    first = model(tokens[:, :5], use_cache=True)
    second = model(tokens[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(second.logits, model(tokens).logits[:, 5:], rtol=1e-4, atol=1e-4)
    assert second.past_key_values.get_seq_length() == 9


def test_rows_of_different_lengths_continue_from_a_cache(model):
    (a, b), (c, d) = (random_tokens(5), random_tokens(7)), (random_tokens(9)[5:], random_tokens(9)[7:])
    tokens, mask = padded_on_the_left([a, b])
    cache = model(tokens, attention_mask=mask, use_cache=True).past_key_values
    more, more_mask = padded_on_the_left([c, d])
    both = torch.cat([mask, more_mask], dim=1)
    logits = model(more, attention_mask=both, past_key_values=cache, logits_to_keep=1).logits
    for row, expected in zip(logits, (torch.cat([a, c]), torch.cat([b, d])), strict=True):
        torch.testing.assert_close(row, model(expected[None]).logits[0, -1:], rtol=1e-4, atol=1e-4)


def test_recomputing_activations_leaves_gradients_as_they_are(model):
    tokens = random_tokens(2, 9)
    gradients = []
    for recompute in (False, True):
        training = copy.deepcopy(model).train()
        if recompute:
            training.gradient_checkpointing_enable()
            assert training.is_gradient_checkpointing
            assert training.model.checkpoint_activations
        training(tokens, labels=tokens).loss.backward()
        gradients.append([p.grad for p in training.parameters()])
    torch.testing.assert_close(*gradients)
    training.gradient_checkpointing_disable()
    assert not training.model.checkpoint_activations
    with pytest.raises(UserError, match="every_n_layers"):
        training.gradient_checkpointing_enable(every_n_layers=2)


def test_a_batch_of_a_cache_can_be_selected_repeated_and_reset(deltanet):
    tokens = random_tokens(2, 9)
    cache = deltanet(tokens[:, :5], use_cache=True).past_key_values
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    logits = deltanet(tokens[:, 5:].flip(0), past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(logits, deltanet(tokens).logits[:, 5:].flip(0), rtol=1e-4, atol=1e-4)
    cache.reset()
    assert torch.equal(deltanet(tokens, past_key_values=cache).logits, deltanet(tokens).logits)
    with pytest.raises(NotImplementedError, match="taken back"):
        cache.crop(-1)


def test_the_size_of_a_cache_does_not_depend_on_the_length(deltanet):
    def size(length):
        cache = deltanet(random_tokens(1, length), use_cache=True).past_key_values
        return sum(x.numel() for layer in cache.layers for x in layer.recurrent_states.values())

    assert size(4) == size(20)


def test_saved_models_load_by_the_auto_classes(model, tmp_path):
    tokens = random_tokens(2, 9)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert type(loaded) is StateTrackForCausalLM
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    tied = model.config.tie_word_embeddings
    assert (loaded.model.head.weight is loaded.model.embedding.weight) == tied
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "statetrack"
    assert config["eigenvalues"] == model.config.eigenvalues
    assert AutoConfig.from_pretrained(tmp_path).model_config == model.config.model_config


def test_a_model_loads_in_half_precision(deltanet, tmp_path):
    deltanet.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    tokens = random_tokens(2, 9)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    difference = (half(tokens).logits.float() - deltanet(tokens).logits).abs().max()
    assert difference < 0.05 * deltanet(tokens).logits.abs().max()


def test_weights_that_a_checkpoint_lacks_get_their_initial_values(tmp_path):
    from safetensors.torch import load_file, save_file

    model = built(BACKBONES["mamba"])
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lacking = "model.blocks.0.mixer.A_log"
    save_file(
        {n: x for n, x in weights.items() if n != lacking}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    loaded, found = StateTrackForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(found["missing_keys"]) == {lacking}
    torch.testing.assert_close(loaded.state_dict()[lacking], model.state_dict()[lacking])  # no random numbers


def test_weights_of_another_size_are_refused(deltanet, tmp_path):
    deltanet.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["backbone"]["d_model"] = 32
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="size"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_vocabulary_can_be_resized(tmp_path):
    for backbone in (BACKBONES["deltanet"], BACKBONES["mamba"]):  # tied and untied
        model = built(backbone)
        tokens = random_tokens(2, 9)
        before = model(tokens).logits
        model.resize_token_embeddings(VOCABULARY + 8)
        assert model.config.vocab_size == VOCABULARY + 8
        torch.testing.assert_close(model(tokens).logits[..., :VOCABULARY], before)
        model.save_pretrained(tmp_path)
        assert torch.equal(
            AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, model(tokens).logits
        )


def test_a_config_names_registered_classes_only():
    with pytest.raises(UserError, match=r"os\.system"):
        StateTrackConfig(backbone={"kind": "os.system"})
    with pytest.raises(UserError, match="expected a ModelConfig"):
        StateTrackConfig(backbone={"kind": "DeltaNetConfig"})


@pytest.mark.parametrize("option", ["d_model", "layers", "hidden_size"])
def test_an_option_of_the_backbone_beside_it_is_refused(option):
    """transformers keeps every unknown option as an attribute: the model would have the default size."""
    with pytest.raises(UserError, match=f"{option} cannot be set here"):
        StateTrackConfig(vocab_size=VOCABULARY, **{option: 64})


def test_the_range_of_a_loaded_model_changes_only_on_purpose(deltanet, tmp_path):
    deltanet.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="open_model"):
        AutoModelForCausalLM.from_pretrained(tmp_path, eigenvalues="[0,1]")


@pytest.mark.parametrize(
    ("backbone", "expected"),
    [
        (model_config("mamba", eigenvalues="[0,1]"), "[0,1]"),
        (ModelConfig(mixers=(MambaConfig("[0,1]"), MambaConfig()), layers=2), "mixed"),
        (ModelConfig(mixers=(MambaConfig("[0,1]"), MambaConfig()), layers=1), "[0,1]"),
        (model_config("slstm"), None),
    ],
)
def test_the_range_is_at_the_top_of_the_config(backbone, expected):
    assert StateTrackConfig(backbone=backbone).eigenvalues == expected


def test_bad_input_is_explained(deltanet):
    tokens = random_tokens(2, 5)
    with pytest.raises(UserError, match="all padding"):
        deltanet(tokens, attention_mask=torch.tensor([[1] * 5, [0] * 5]))
    with pytest.raises(UserError, match="columns"):
        deltanet(tokens, attention_mask=torch.ones(2, 4))
    with pytest.raises(UserError, match="expected the StateCache"):
        deltanet(tokens, past_key_values=transformers.DynamicCache())
    with pytest.raises(UserError, match="hidden states"):
        deltanet(tokens, output_hidden_states=True)
    with pytest.raises(UserError, match="position_ids and cu_seq_lens_q are not taken"):
        deltanet(tokens, position_ids=torch.arange(5)[None])
    with pytest.raises(UserError, match="token_type_ids not known"):
        deltanet(tokens, token_type_ids=tokens)
    with pytest.raises(UserError, match="neither of input_ids and inputs_embeds"):
        deltanet()
    with pytest.raises(UserError, match=r"\(batch, time, d_model\) = \(batch, time, 16\)"):
        deltanet(inputs_embeds=torch.randn(2, 5, 7))
    with pytest.raises(UserError, match=r"input_ids has shape \(5,\), expected \(batch, time\)"):
        deltanet(tokens[0])
    with pytest.raises(UserError, match=r"input_ids has shape \(2, 0\), .*at least one token"):
        deltanet(tokens[:, :0])
    with pytest.raises(UserError, match=r"labels has shape \(2, 3\), expected \(2, 5\) like the tokens"):
        deltanet(tokens, labels=tokens[:, :3])
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        deltanet.generate(tokens[:1], assistant_model=deltanet, max_new_tokens=2)
    with pytest.raises(UserError, match="3 classes"):
        StateTrackForCausalLM.from_model(Model(BACKBONES["mamba"], 5, 3))


def test_a_model_can_be_wrapped_without_a_copy():
    model = Model(BACKBONES["deltanet"], VOCABULARY, VOCABULARY).eval()
    wrapper = StateTrackForCausalLM.from_model(model, context=64)
    assert wrapper.model is model
    assert not wrapper.training
    assert wrapper.config.max_position_embeddings == 64
    assert isinstance(wrapper(random_tokens(1, 3)).past_key_values, StateCache)


@pytest.mark.filterwarnings("ignore")  # Trainer's own
def test_trainer_trains_it(tmp_path):
    pytest.importorskip("accelerate")
    counting = [torch.arange(i, i + 12) % VOCABULARY for i in range(32)]
    rows = [{"input_ids": row, "labels": row} for row in counting]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=12,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=3e-2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    model = StateTrackForCausalLM(StateTrackConfig(backbone=BACKBONES["deltanet"], vocab_size=VOCABULARY))
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.8 * before
