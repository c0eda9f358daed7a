"""Layers compute with a module's weights only where calling the module would do nothing else."""

import copy
import itertools
import math
import os
import subprocess
import sys

import pytest
import torch
from module_changes import CHANGES, change, weighted_modules
from torch import nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

from statetrack.errors import UserError
from statetrack.layers import DeltaNetConfig, Model, ModelConfig, build, fusion
from statetrack.layers.fusion import fused, fuses, may_read
from statetrack.layers.mixer import Packing
from statetrack.layers.norm import RMSNorm, normalise, normalise_sum
from statetrack.layers.precision import working_dtype
from statetrack.training.half_weights import HalfWeights

CASES = {
    "deltanet": ("deltanet", {}),
    "no convolution": ("deltanet-no-conv", {}),
    "gated": ("gated-deltanet", {}),
    "two factors": ("deltaproduct", {}),
    "mamba": ("mamba", {}),
    "attention": ("transformer", {}),
    "mlstm": ("mlstm", {}),
    "slstm": ("slstm", {}),
}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
BOUNDS = [0, 3, 8]


def small(case):
    torch.manual_seed(0)
    name, changes = CASES[case]
    heads = {} if name == "mamba" else {"heads": 2}
    model = build(name, vocab_size=11, d_model=8, **heads, **changes)
    for p in model.parameters():  # away from zeros and ones, and large, so that every module has an effect
        p.data.mul_(3).add_(torch.randn_like(p), alpha=0.1)
    return model.double()


def logits(model, choice, packing=None):
    with fused(choice), torch.no_grad():
        return model(TOKENS, packing=packing)[0]


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("case", CASES)
def test_a_changed_module_takes_effect_once_on_every_path(case, how):
    model = small(case)
    before = logits(model, False)
    for name in weighted_modules(model):
        changed = copy.deepcopy(model)
        calls = change(changed, name, how)
        expected = logits(changed, False)
        assert len(calls) == 1, name
        assert (expected - before).abs().max() > 1e-4, name
        for choice in (None, True):
            calls.clear()
            actual = logits(changed, choice)
            assert len(calls) == 1, (name, choice)
            torch.testing.assert_close(
                actual, expected, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("case", ["deltanet", "gated", "mamba"])
def test_a_changed_module_takes_effect_once_on_packed_sequences(case, how):
    model, packing = small(case), Packing(torch.tensor(BOUNDS), 5)
    for name in weighted_modules(model):
        changed = copy.deepcopy(model)
        calls = change(changed, name, how)
        with torch.no_grad():
            each = [changed(TOKENS[:, a:b])[0] for a, b in itertools.pairwise(BOUNDS)]
        for choice in (None, False, True):
            calls.clear()
            actual = logits(changed, choice, packing)
            assert len(calls) == 1, (name, choice)
            torch.testing.assert_close(actual, torch.cat(each, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", CHANGES)
def test_a_changed_head_takes_effect_where_it_would_be_padded(how):
    model = small("no convolution").bfloat16()
    before = logits(model, True)
    calls = change(model, "head", how)
    torch.testing.assert_close(logits(model, True), logits(model, False), rtol=0.02, atol=0.02)
    assert (logits(model, True) - before).abs().max() > 0.05
    assert len(calls) == 3


@pytest.mark.parametrize("case", CASES)
def test_adapters_on_every_linear_map_get_the_same_gradients_on_both_paths(case):
    model = small(case)
    for name in weighted_modules(model):
        if isinstance(model.get_submodule(name), nn.Linear):
            change(model, name, "adapter")
    found = []
    for choice in (False, True):
        model.zero_grad()
        with fused(choice):
            model(TOKENS)[0].square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(
            found[1][name], gradient, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )
        assert gradient.abs().sum() > 0, name


def test_a_backward_hook_fires_once_on_every_path():
    model, calls = small("deltanet"), []
    model.blocks[0].mixer.to_q.register_full_backward_hook(lambda *_: calls.append(1))
    for choice in (None, False, True):
        calls.clear()
        with fused(choice):
            model(TOKENS)[0].sum().backward()
        assert calls == [1]


def test_a_hook_on_all_modules_sees_every_module_on_every_path():
    model = small("gated")
    names = {id(module): name for name, module in model.named_modules()}
    for choice in (None, False, True):
        seen = []
        hook = nn.modules.module.register_module_forward_hook(
            lambda module, args, output, seen=seen: seen.append(names[id(module)])
        )
        try:
            logits(model, choice)
        finally:
            hook.remove()
        expected = weighted_modules(model)
        assert sorted(name for name in seen if name in expected) == sorted(expected)


@pytest.mark.parametrize("name", ["to_q", "to_beta", "output_gate"])
def test_the_bias_of_a_linear_map_that_came_without_one_counts(name):
    model = small("gated")
    mixer = model.blocks[0].mixer
    linear = getattr(mixer, name)
    setattr(mixer, name, nn.Linear(linear.in_features, linear.out_features).double())
    nn.init.ones_(getattr(mixer, name).bias)
    torch.testing.assert_close(logits(model, True), logits(model, False), rtol=1e-4, atol=1e-5)


def test_the_options_of_an_embedding_count():
    model = small("deltanet")
    model.embedding.padding_idx = 1
    with fused(True):
        model(TOKENS)[0].sum().backward()
    assert model.embedding.weight.grad[1].abs().sum() == 0
    assert model.embedding.weight.grad[3].abs().sum() > 0


class Quantised(torch.Tensor):
    """A subclass of Tensor, as quantised and distributed weights are."""


class Linear(nn.Linear):
    pass


def quantised(linear, name="weight"):
    setattr(linear, name, nn.Parameter(getattr(linear, name).data.as_subclass(Quantised)))
    return linear


NOT_PLAIN = {
    "subclass": lambda linear: Linear(4, 4),
    "another module": lambda linear: nn.Identity(),
    "subclass of Tensor": quantised,
    "bias that is a subclass of Tensor": lambda linear: quantised(linear, "bias"),
    "weight norm": nn.utils.parametrizations.weight_norm,
    "pruned": lambda linear: prune.l1_unstructured(linear, "weight", amount=2),
    "hook": lambda linear: linear.register_forward_hook(lambda *_: None) and linear,
    "pre-hook": lambda linear: linear.register_forward_pre_hook(lambda *_: None) and linear,
    "backward hook": lambda linear: linear.register_full_backward_hook(lambda *_: None) and linear,
    "backward pre-hook": lambda linear: linear.register_full_backward_pre_hook(lambda *_: None) and linear,
}


@pytest.mark.parametrize("how", NOT_PLAIN)
def test_modules_that_are_not_plain_are_not_read(how):
    plain, other = nn.Linear(4, 4), NOT_PLAIN[how](nn.Linear(4, 4))
    assert may_read(nn.Linear, plain, plain)
    assert not may_read(nn.Linear, plain, other)


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
    ],
)
def test_no_module_is_read_while_a_hook_on_all_modules_is_there(register):
    linear = nn.Linear(4, 4)
    hook = register(lambda *_: None)
    try:
        assert not may_read(nn.Linear, linear)
    finally:
        hook.remove()
    assert may_read(nn.Linear, linear)


def test_a_removed_hook_is_not_remembered():
    linear = nn.Linear(4, 4)
    hook = linear.register_forward_hook(lambda *_: None)
    assert not may_read(nn.Linear, linear)
    hook.remove()
    assert may_read(nn.Linear, linear)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("choice", "count"), [(False, 9), (True, 5)])
def test_bfloat16_copies_of_weights_keep_the_fused_path(choice, count):
    """q, k, v and beta are one product, gate and up of the MLP another; three maps are alone."""
    model = small("no convolution").float()
    run = HalfWeights(model)
    with Products() as products, fused(choice), torch.autocast("cpu", torch.bfloat16):
        run(TOKENS)
    assert products.count == count


def test_joined_products_read_bfloat16_copies_where_they_are():
    """No torch.cat, and so none to keep: the same numbers and gradients as with one."""
    torch.manual_seed(0)
    model = Model(ModelConfig(DeltaNetConfig(heads=8), 16), 8, 8)  # no padded columns
    tokens = torch.randint(8, (2, 9))
    found = {}
    for in_a_row in (True, False):
        run = HalfWeights(model)
        if not in_a_row:
            run.copies = {name: w.detach().clone().requires_grad_() for name, w in run.copies.items()}
        with Cats() as cats, fused(True), torch.autocast("cpu", torch.bfloat16):
            out = run(tokens)[0]
        out.float().square().sum().backward()
        assert (cats.count == 0) == in_a_row
        found[in_a_row] = [out, *(w.grad for w in run.copies.values())]
    assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))


class Cats(TorchDispatchMode):
    """Counts copies of matrices into one."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.cat.default and args[0][0].dtype == torch.bfloat16
        return function(*args, **(kwargs or {}))


def test_bfloat16_copies_are_made_of_stored_weights_only():
    model = small("deltanet").float()
    nn.utils.parametrizations.weight_norm(model.blocks[0].mixer.to_q)
    copies = HalfWeights(model)
    assert "blocks.0.mixer.to_k.weight" in copies.copies
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(copies(TOKENS)[0], model(TOKENS)[0])


def test_a_tied_head_stays_the_weight_of_the_embedding():
    model = Model(ModelConfig(DeltaNetConfig(heads=2), 16, tied=True), 7, 7)
    copies = HalfWeights(model)
    assert "head.weight" not in copies.copies
    assert "blocks.0.mixer.to_q.weight" in copies.copies


def test_large_layers_compute_again_what_they_do_not_keep(monkeypatch):
    config = ModelConfig(DeltaNetConfig(heads=2, householders=2), 16)
    torch.manual_seed(0)
    model, tokens = Model(config, 7, 7), torch.randint(7, (1, 9))
    found = {}
    monkeypatch.setattr(fusion, "RECOMPUTE_FROM", 0)
    for choice in (False, True):
        monkeypatch.setenv("STATETRACK_BACKEND", "triton" if choice else "auto")
        kept = []
        with (
            fused(choice),
            torch.autograd.graph.saved_tensors_hooks(lambda z, kept=kept: kept.append(z) or z, lambda z: z),
        ):
            loss = model(tokens)[0].square().sum()
        found[choice] = torch.autograd.grad(loss, list(model.parameters())), sum(z.numel() for z in kept)
    torch.testing.assert_close(found[True][0], found[False][0], rtol=1e-4, atol=1e-5)
    assert found[True][1] < found[False][1]


def test_the_innermost_switch_counts_and_the_outer_one_returns():
    x, linear = torch.zeros(1), nn.Linear(2, 2)
    with fused(True):
        with fused(False):
            assert not fuses(x)
            assert not may_read(nn.Linear, linear)
        assert fuses(x)
        assert may_read(nn.Linear, linear)
    assert not fuses(x)
    assert may_read(nn.Linear, linear)


def test_an_error_restores_the_switch():
    with pytest.raises(ZeroDivisionError), fused(True):
        _ = 1 / 0
    assert not fuses(torch.zeros(1))


def test_a_process_takes_its_choice_from_the_environment(monkeypatch):
    code = "import torch; from statetrack.layers.fusion import fuses; print(fuses(torch.zeros(1)))"
    environment = os.environ | {"STATETRACK_FUSION": "1"}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert printed.strip() == "True"
    monkeypatch.setenv("STATETRACK_FUSION", "0")
    assert fusion._from_environment() is False
    monkeypatch.setenv("STATETRACK_FUSION", "off")
    with pytest.raises(UserError, match="STATETRACK_FUSION"):
        fusion._from_environment()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_fused_kernel_writes_what_autocast_would_read_and_every_other_path_the_dtype_it_got(dtype):
    x = torch.zeros(2, dtype=dtype)
    for choice in (None, False, True):
        with fused(choice):
            assert working_dtype(x) == dtype
            with torch.autocast("cpu", torch.float16):
                assert working_dtype(x) == (torch.float16 if choice else dtype)


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_norms_have_one_eps_on_every_path_also_none(eps):
    """x / sqrt(mean(x^2) + eps), with x so small that eps decides."""
    x, norm = torch.tensor([[3e-3, -4e-3]], dtype=torch.float64), RMSNorm(2, eps=eps).double()
    expected = x / math.sqrt(12.5e-6 + eps)
    for choice in (False, True):
        with fused(choice):
            for found in (norm(x), normalise(norm, x, x.dtype), *normalise_sum(norm, x / 2, x / 2)[1:]):
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
