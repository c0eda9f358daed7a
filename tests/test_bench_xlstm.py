"""The models that the benchmark compares are the same ones."""

import dataclasses

import pytest

from statetrack.bench.cases import CPU_CASES, KINDS, as_dict, signed_case
from statetrack.bench.xlstm_case import XlstmCase


@pytest.mark.parametrize("kind", ["mlstm", "slstm"])
def test_both_models_have_the_same_weights_but_for_biases_of_norms(kind):
    case = XlstmCase(2, 8, kind, d_model=64)
    ours = {name: p for name, p in case.our_model().named_parameters() if not name.endswith("norm.bias")}
    theirs = dict(case.peer_model().named_parameters())
    assert sum(p.numel() for p in ours.values()) == sum(p.numel() for p in theirs.values())


@pytest.mark.parametrize("kind", ["mlstm", "slstm"])
def test_each_side_gives_every_weight_a_gradient(kind, monkeypatch):
    case = XlstmCase(2, 8, kind, layers=1, d_model=64)
    for side, make in (("ours", case.our_model), ("peer", case.peer_model)):
        model = make()
        monkeypatch.setattr(XlstmCase, "our_model", lambda _, model=model: model)
        monkeypatch.setattr(XlstmCase, "peer_model", lambda _, model=model: model)
        getattr(case, side)()()
        monkeypatch.undo()
        assert all(p.grad is not None for p in model.parameters())


def test_the_case_is_listed_and_can_be_sent_to_another_process():
    listed = [case for case in CPU_CASES if isinstance(case, XlstmCase)]
    assert [case.mixer for case in listed] == ["mlstm", "slstm"]
    fields = as_dict(listed[0])
    assert KINDS[fields.pop("kind")](**fields) == listed[0]
    assert signed_case(listed[0]) is None
    assert dataclasses.replace(listed[0], B=1, T=8).name == "mlstm model B1 T8 L2 d128"
