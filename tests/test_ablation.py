"""The ablation of small kernels without a GPU: what is compared, and that it is replaced."""

import pytest
import torch

from statetrack.bench import ablation
from statetrack.bench.ablation import VARIANTS, Variant, applies, specs
from statetrack.commands.bench import BenchOptions, bench
from statetrack.errors import UserError
from statetrack.ops.backends import replaced_op
from statetrack.ops.swiglu import swiglu


def test_without_a_gpu_it_is_refused():
    with pytest.raises(UserError, match="--ablation measures kernels of a GPU"):
        bench(BenchOptions(device="cpu", ablation=True))


def test_a_replaced_op_is_called_in_place_of_every_backend_and_only_inside_the_block():
    x = torch.randn(3, 8)
    with replaced_op("swiglu", lambda given: given.new_full((), 7.0)):
        assert swiglu(x) == 7
        assert swiglu(x, backend="reference").shape == (3, 4)  # asked for by name
    assert swiglu(x).shape == (3, 4)


def test_variants_leave_out_what_a_step_does_not_have():
    names = {name: {v.name for v in VARIANTS if applies(v, spec)} for name, spec in specs().items()}
    swaps, parity, mamba = (next(n for n in names if w in n) for w in ("S5", "parity", "mamba"))
    assert "padded instead of packed" not in names[swaps]  # all of one length
    assert "padded instead of packed" in names[parity]
    assert "SwiGLU compiled" not in names[mamba]  # no MLP
    assert all("as shipped" in found for found in names.values())


def test_rows_hold_the_cost_relative_to_the_step_as_shipped(monkeypatch, capsys):
    milliseconds = {"as shipped": 1.0, "norms compiled": 1.1}
    monkeypatch.setattr(
        ablation, "VARIANTS", (Variant("as shipped"), Variant("norms compiled", ("rms_norm",)))
    )
    monkeypatch.setattr(ablation, "_work", lambda spec, variant: variant.name)
    monkeypatch.setattr(ablation, "seconds_per_step", lambda work, steps: milliseconds[work] / 1e3)
    kept = []
    ablation.ablation_report(lambda name: "S5" in name, kept.append)
    rows = kept[-1]["ablation"]
    assert {row["variant"]: round(row["cost"], 3) for row in rows} == {
        "as shipped": 0.0,
        "norms compiled": 0.1,
    }
    assert "+10.0%" in capsys.readouterr().out


def test_a_variant_that_cannot_run_is_a_row_without_a_time(monkeypatch, capsys):
    def work(spec, variant):
        raise RuntimeError("no CUDA graph")

    monkeypatch.setattr(ablation, "VARIANTS", (Variant("as shipped"),))
    monkeypatch.setattr(ablation, "_work", work)
    kept = []
    ablation.ablation_report(lambda name: "parity" in name, kept.append)
    assert [row["ms"] for row in kept[-1]["ablation"]] == [None, None]
    assert "RuntimeError: no CUDA graph" in capsys.readouterr().out


def test_every_replaceable_op_has_the_reference_that_is_compiled():
    wanted = {op for variant in VARIANTS for op in variant.ops}
    assert wanted == set(ablation.REPLACEABLE)
    for backends in ablation.REPLACEABLE.values():
        assert callable(ablation.load(backends["reference"]))
