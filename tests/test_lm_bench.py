"""The benchmark of language models: its data, its cases and its tables; times need a GPU."""

import pytest
import torch

from statetrack.bench.lm_step import LM_STEPS, LmStep, category, profile_text, random_shards
from statetrack.commands.bench import BenchOptions, bench
from statetrack.errors import UserError
from statetrack.layers import Model
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


def test_without_a_gpu_there_is_nothing_to_time():
    with pytest.raises(UserError, match="--lm measures training steps on a GPU"):
        bench(BenchOptions(device="cpu", lm=True))
