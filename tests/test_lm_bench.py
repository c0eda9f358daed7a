"""The benchmark of language models: its data, its cases and its tables; times need a GPU."""

import pytest
import torch

from statetrack.bench.lm_decode import (
    LmDecode,
    our_decoder,
    seconds_per_step,
    transformers_mamba_decoder,
)
from statetrack.bench.lm_step import LM_STEPS, LmStep, category, profile_text, random_shards
from statetrack.commands.bench import BenchOptions, bench
from statetrack.layers import Model, model_config
from statetrack.tasks.token_shards import TokenShards
from statetrack.training.throughput import flops_per_token


def test_random_shards_hold_frequent_and_rare_tokens(tmp_path):
    random_shards(tmp_path, 1000, 20_000)
    shards = TokenShards.open(tmp_path)
    shards.verify()
    tokens = shards.read("train", 0, 20_000)
    assert (tokens < 10).mean() > 5 * (tokens >= 990).mean() > 0


def test_the_cases_are_the_published_models(tmp_path):
    random_shards(tmp_path, 32_000, 5000)
    counts = []
    for case in LM_STEPS:
        config = case.spec(tmp_path).model
        with torch.device("meta"):
            counts.append(sum(p.numel() for p in Model(config, 32_000, 32_000).parameters()))
    assert counts == [374_362_112, 352_797_696]
    # all parameters but those of the embedding multiply a token
    untied = LM_STEPS[0].spec(tmp_path).model
    assert flops_per_token(untied, 32_000, 2048) == 6 * (374_362_112 - 32_000 * 1024)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "matrix products"),
        ("rms_norm_backward_kernel", "norms"),
        ("norm_kernel", "optimiser"),
        ("sweep_backward_kernel", "delta rule"),
        ("convolution_forward_kernel", "convolution"),
        ("swiglu_backward_kernel", "SwiGLU"),
        ("row_losses_kernel", "loss"),
        ("sorted_backward_kernel", "embedding"),
        ("void at::native::vectorized_elementwise_kernel", "copies and the rest"),
    ],
)
def test_kernels_have_a_category(kernel, expected):
    assert category(kernel) == expected


def test_a_profile_is_a_table():
    kernels = [{"kernel": "nvjet", "ms": 3.0, "calls": 2.0, "category": "matrix products"}]
    text = profile_text({"categories": {"matrix products": 3.0}, "total_ms": 3.0, "kernels": kernels})
    assert [line.split()[0] for line in text.splitlines() if line] == ["matrix", "all", "3.000"]


def test_a_step_is_named_by_its_shape():
    assert LmStep("deltanet-60m", 4, 128).name == "deltanet-60m training step, B4 T128"


@pytest.mark.parametrize("model", ["deltanet-10m", "mamba-10m"])
def test_decoding_is_timed_on_a_cpu(model):
    case = LmDecode(model, batch=2, prompt=5, vocabulary=50)
    row = case.row(seconds_per_step(our_decoder(case, "cpu", False), 2, "cpu", 2, 1), "ours")
    assert row["tokens_per_s"] == pytest.approx(2e3 / row["ms_per_token"])


def test_the_peer_of_decoding_has_as_many_weights():
    transformers = pytest.importorskip("transformers")
    case = LmDecode("mamba-10m", prompt=5, vocabulary=50)
    made = []
    init = transformers.MambaForCausalLM.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            transformers.MambaForCausalLM,
            "__init__",
            lambda self, config: made.append(self) or init(self, config),
        )
        decode = transformers_mamba_decoder(case)
    ours = Model(model_config(case.model), 50, 50)
    assert made[0].num_parameters() == sum(p.numel() for p in ours.parameters())
    assert decode(torch.zeros(1, dtype=torch.long)).shape == (1,)


def test_without_a_gpu_decoding_alone_is_timed(monkeypatch, capsys):
    monkeypatch.setattr("statetrack.bench.lm_decode.CPU_DECODING", [LmDecode("mamba-10m", 1, 5, 50)])
    bench(BenchOptions(device="cpu", lm=True, peers=False))
    assert "mamba-10m decoding, B1" in capsys.readouterr().out
