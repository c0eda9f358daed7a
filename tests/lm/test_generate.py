"""Generation from the state is what the whole model would do; text comes in whole characters."""

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trained import trained_run

from statetrack.cli import main
from statetrack.errors import UserError
from statetrack.layers import AttentionConfig, DeltaNetConfig, MambaConfig, Model, ModelConfig
from statetrack.lm.generate import Sampling, decode_step, generate, stream, text_pieces
from statetrack.lm.tokenizers import BytesTokenizer

VOCABULARY = 30


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    mixers = (DeltaNetConfig(2), MambaConfig(), AttentionConfig(2))
    model = Model(ModelConfig(mixers=mixers, d_model=16, layers=3, mlp_ratio=0), VOCABULARY, VOCABULARY)
    with torch.no_grad():
        model.embedding.weight.mul_(20)
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trained_run(tmp_path_factory.mktemp("trained"))


def prompts(batch: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def test_greedy_generation_takes_the_most_probable_token_of_the_whole_sequence(model):
    tokens = prompts()
    for _ in range(6):
        tokens = torch.cat([tokens, model(tokens)[0][:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generate(model, prompts(), 6), tokens)


def test_steps_of_decoding_give_the_logits_of_the_whole_sequence(model):
    tokens = prompts(length=8)
    _, state = model(tokens[:, :4])
    for t in range(4, 8):
        logits, state = decode_step(model, tokens[:, t], state)
        torch.testing.assert_close(logits, model(tokens[:, : t + 1])[0][:, -1], rtol=1e-4, atol=1e-4)


def test_a_seed_repeats_a_sample_and_another_gives_another(model):
    def sampled(seed):
        generator = torch.Generator().manual_seed(seed)
        return generate(model, prompts(), 12, Sampling(), generator=generator)

    assert torch.equal(sampled(3), sampled(3))
    assert not torch.equal(sampled(3), sampled(4))


def test_samples_follow_the_probabilities_at_their_temperature():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    for temperature in (0.5, 1.0, 2.0):
        drawn = Sampling(temperature).choose(logits.expand(20_000, -1), torch.Generator().manual_seed(0))
        found = torch.bincount(drawn, minlength=3) / len(drawn)
        torch.testing.assert_close(found, (logits[0] / temperature).softmax(-1), atol=0.02, rtol=0)


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-3])
def test_at_a_tiny_temperature_the_most_probable_token_is_chosen(temperature):
    logits = torch.tensor([[3.0, 50.0, 49.0]]).expand(50, -1)
    assert (Sampling(temperature).choose(logits, torch.Generator().manual_seed(0)) == 1).all()


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(top_k=2), {1, 3}),
        (Sampling(top_k=1), {3}),
        (Sampling(top_k=9), {0, 1, 2, 3}),
        (Sampling(top_p=0.69), {1, 3}),  # probabilities 0.1, 0.3, 0.2, 0.4
        (Sampling(top_p=0.71), {1, 2, 3}),
        (Sampling(top_p=0.01), {3}),
        (Sampling(top_k=3, top_p=0.5), {1, 3}),  # of the three: 0.33, 0.22, 0.44
        (Sampling(temperature=0, top_p=0.5), {3}),
    ],
)
def test_top_k_and_top_p_keep_the_most_probable_tokens(sampling, possible):
    logits = torch.tensor([[0.1, 0.3, 0.2, 0.4]]).log().expand(500, -1)
    assert {*sampling.choose(logits, torch.Generator().manual_seed(0)).tolist()} == possible


def test_tokens_beyond_those_of_the_tokenizer_are_never_chosen(model):
    new = generate(model, prompts(), 40, Sampling(temperature=5.0), known=3)[:, 5:]
    assert new.max() < 3


def test_a_stream_needs_no_end(model):
    endless = stream(model, prompts())
    first = torch.stack([next(endless) for _ in range(7)], dim=1)
    assert torch.equal(first, generate(model, prompts(), 7)[:, 5:])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: generate(m, prompts(length=0), 2), "at least one token"),
        (lambda m: generate(m, prompts(), -1), "max_new_tokens is -1"),
        (lambda m: generate(Model(m.config, 5, 3), prompts(), 2), "3 classes"),
        (lambda m: Sampling(temperature=-1.0), "temperature is -1"),
        (lambda m: Sampling(temperature=float("nan")), "temperature is nan"),
        (lambda m: Sampling(top_p=0.0), "top_p is 0"),
        (lambda m: Sampling(top_k=-1), "top_k is -1"),
    ],
)
def test_wrong_options_are_explained(model, call, message):
    with pytest.raises(UserError, match=message):
        call(model)


@given(st.text(max_size=30))
def test_pieces_of_text_are_whole_characters_and_together_the_text(text):
    pieces = list(text_pieces(BytesTokenizer().decode, text.encode(errors="replace")))
    assert "".join(pieces) == text.encode(errors="replace").decode()
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_come_out_too(raw):
    """A broken character is replaced; that it waits for its next bytes must not hold up what follows."""
    assert "".join(text_pieces(BytesTokenizer().decode, raw)) == raw.decode(errors="replace")


def test_pieces_keep_the_spaces_of_a_tokenizer_that_strips_the_first():
    words = ["▁one", "▁two", "s", "▁three"]

    def decode(tokens):
        return "".join(words[t] for t in tokens).replace("▁", " ").removeprefix(" ")

    assert list(text_pieces(decode, [0, 1, 2, 3])) == ["one", " two", "s", " three"]


def test_the_command_continues_a_prompt(folder, capsys):
    arguments = ["lm", "generate", str(folder), "--max-new-tokens", "12", "--temperature", "0"]
    main([*arguments, "--prompt", "one two thr"])
    text = capsys.readouterr().out
    assert text.startswith("one two thr")
    assert len(text) > len("one two thr\n")
    main([*arguments, "--prompt", "one two thr"])
    assert capsys.readouterr().out == text


def test_the_command_reads_a_prompt_from_the_standard_input(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("seven ei"))
    main(["lm", "generate", str(folder), "--prompt", "-", "--max-new-tokens", "3", "--top-k", "5"])
    assert capsys.readouterr().out.startswith("seven ei")


def test_without_a_prompt_the_command_starts_a_document(folder, capsys):
    main(["lm", "generate", str(folder), "--max-new-tokens", "5", "--temperature", "0"])
    assert len(capsys.readouterr().out) > 1


def test_text_ends_with_the_document(folder, capsys, monkeypatch):
    """The model is made to end the document at once."""
    monkeypatch.setattr(Sampling, "choose", lambda self, logits, generator: torch.tensor([256]))
    main(["lm", "generate", str(folder), "--prompt", "one"])
    assert capsys.readouterr().out == "one\n"


def test_ctrl_c_leaves_a_whole_line(folder, capsys, monkeypatch):
    def interrupted(self, logits, generator):
        raise KeyboardInterrupt

    monkeypatch.setattr(Sampling, "choose", interrupted)
    with pytest.raises(SystemExit) as stopped:
        main(["lm", "generate", str(folder), "--prompt", "one"])
    printed = capsys.readouterr()
    assert stopped.value.code == 130
    assert printed.out == "one\n"
    assert printed.err == "Stopped.\n"


def test_mistakes_are_explained_before_anything_is_printed(folder, tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    for arguments, message in (
        (["--prompt", "one", str(folder)], "first, before any option"),
        ([str(folder), "--prompt", "one", "--tokenizer", str(tmp_path / "other.json")], "tokenizer"),
        ([str(folder), "--seed", "9" * 20], "lm generate: seed is 99999999999999999999"),
        ([str(folder), "--prompt", "\udcff"], "the prompt is not text in UTF-8"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["lm", "generate", *arguments])
        printed = capsys.readouterr()
        assert (stopped.value.code, printed.out) == (2, "")
        assert message in printed.err
