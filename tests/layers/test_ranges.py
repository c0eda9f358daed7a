"""Models in [0,1] opened in [-1,1]."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.layers import build, extended_range

TOKENS = torch.randint(7, (8, 32), generator=torch.Generator().manual_seed(0))
MODELS = {
    "deltanet": ("deltanet", {}),
    "gated": ("gated-deltanet", {"householders": 2}),
    "kda": ("kda", {}),
    "mamba": ("mamba", {}),
    "mamba2": ("mamba2", {}),
    "mamba3": ("mamba3", {}),
    "hybrid": ("deltanet", {"attention_every": 2, "tied": True}),
}


def narrow(case, eigenvalues="[0,1]"):
    """A model with betas and step sizes of all sizes, as training makes them."""
    torch.manual_seed(0)
    name, changes = MODELS[case]
    model = build(name, vocab_size=7, d_model=32, layers=2, eigenvalues=eigenvalues, **changes)
    with torch.no_grad():
        for layer, p in model.named_parameters():
            if "to_beta" in layer or "dt_proj.weight" in layer:
                p *= 4
    return model


def spectra(model):
    return torch.cat([s.flatten() for s in model.transition_eigenvalues(TOKENS) if s is not None])


@pytest.mark.parametrize("case", ["deltanet", "mamba", "mamba3", "hybrid"])
def test_the_same_weights_have_eigenvalues_twice_as_far_from_one(case):
    model = narrow(case)
    extended = extended_range(model)
    assert (model.config.mixer.eigenvalues, extended.config.mixer.eigenvalues) == ("[0,1]", "[-1,1]")
    for (name, a), (_, b) in zip(model.named_parameters(), extended.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a is not b
    first = [m.transition_eigenvalues(TOKENS)[0] for m in (model, extended)]  # later layers read other inputs
    torch.testing.assert_close(first[1], 2 * first[0] - 1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", MODELS)
def test_a_kept_function_is_nearer_than_kept_weights(case):
    model = narrow(case)
    logits, _ = model(TOKENS)
    distances = {
        keep: (extended_range(model, keep, TOKENS)(TOKENS)[0] - logits).square().mean().sqrt().item()
        for keep in ("weights", "function")
    }
    assert distances["function"] < 0.5 * distances["weights"]
    assert distances["weights"] > 1e-4  # far above rounding


def test_a_kept_function_changes_the_weights_behind_the_eigenvalues_only():
    for case, behind in (("deltanet", "to_beta.weight"), ("mamba", "A_log")):
        model = narrow(case)
        extended = extended_range(model, "function", TOKENS).state_dict()
        changed = [name for name, p in model.state_dict().items() if not torch.equal(p, extended[name])]
        assert changed == [f"blocks.{i}.mixer.{behind}" for i in range(2)]


def test_mamba_keeps_its_eigenvalues_exactly_where_the_step_size_is_constant():
    model = narrow("mamba")
    with torch.no_grad():
        for block in model.blocks:
            block.mixer.dt_proj.weight.zero_()
    extended = extended_range(model, "function", TOKENS)
    torch.testing.assert_close(spectra(extended), spectra(model), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(extended(TOKENS)[0], model(TOKENS)[0], rtol=1e-4, atol=1e-4)


def test_an_extended_model_trains_and_reaches_below_zero():
    model = extended_range(narrow("deltanet"), "function", TOKENS)
    loss, _ = model(TOKENS, targets=TOKENS)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert spectra(extended_range(narrow("deltanet"))).min() < -0.5


def test_wrong_extensions_are_refused():
    with pytest.raises(UserError, match=r"no mixer of the model has eigenvalues in \[0,1\]"):
        extended_range(narrow("deltanet", "[-1,1]"))
    with pytest.raises(UserError, match="no mixer"):
        extended_range(build("transformer", vocab_size=7, d_model=16))
    with pytest.raises(UserError, match="without tokens"):
        extended_range(narrow("deltanet"), "function")
    with pytest.raises(UserError, match="Did you mean 'weights'"):
        extended_range(narrow("deltanet"), "weight")  # type: ignore[arg-type]
    for case, options in {
        "deltanet": {"beta": "hard"},
        "kda": {"beta": "hard"},
        "gated-deltanet": {"signed_gate": True},
        "mamba2": {"gate": "hard"},
    }.items():
        (name, value), *_ = options.items()
        hard = build(case, vocab_size=7, d_model=32, eigenvalues="[0,1]", **options)
        with pytest.raises(UserError, match=f"with {name}={value!r} cannot keep its function"):
            extended_range(hard, "function", TOKENS)
    with pytest.raises(UserError, match="DiagonalToy cannot keep its function"):
        extended_range(build("diagonal-toy", vocab_size=7, eigenvalues="[0,1]"), "function", TOKENS)
