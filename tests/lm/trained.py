"""A small trained language model of bytes, for tests of what is done with one."""

from pathlib import Path

from statetrack.layers import DeltaNetConfig, ModelConfig
from statetrack.lm.shards import write_shards
from statetrack.lm.tokenizers import BytesTokenizer
from statetrack.run import run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import Corpus
from statetrack.training import Options

TEXT = "one two three four five six seven eight nine ten "


def bytes_shards(folder: Path) -> Path:
    documents = [BytesTokenizer().encode(TEXT[i:] + TEXT) for i in range(40)]
    write_shards(folder, {"train": documents, "heldout": documents[:4]}, vocab_size=257, end_of_document=256)
    (folder / "tokenizer.json").write_text(BytesTokenizer().to_json())
    return folder


def small_spec(data: Path, **changes) -> RunSpec:
    return RunSpec(
        Corpus(str(data), context=32, vocabulary=264),
        ModelConfig(DeltaNetConfig(2, gated=True), d_model=16, layers=2, mlp_ratio=2, tied=True),
        TrainingConfig(**({"steps": 30, "batch": 8, "lr": 1e-2} | changes)),
        EvaluationConfig(eval_samples=2, eval_batch=2),
    )


def trained_run(folder: Path) -> Path:
    """The folder of a finished run, with the tokenizer beside its weights."""
    data = bytes_shards(folder / "data")
    run(small_spec(data), folder / "run", Options(device="cpu"))
    (folder / "run" / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())
    return folder / "run"
