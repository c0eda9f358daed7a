"""The recurrences under torch.compile, torch.func, forward-mode derivatives and on the meta device."""

import pytest
import torch
from torch.autograd import forward_ad

from statetrack.errors import UserError
from statetrack.layers.model import Model
from statetrack.layers.presets import model_config
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.gated_linear_attention import gated_linear_attention
from statetrack.ops.selective_scan import selective_scan
from statetrack.ops.slstm import slstm

# PyTorch's own, when it traces an autograd.Function or loads its forward-mode rules
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
T = 12


def delta(v, backend):
    q, beta = torch.linspace(-1, 1, v.numel()).view(v.shape), torch.ones(v.shape[:3])
    return delta_rule(q, q, v, beta, use_qk_l2norm_in_kernel=True, backend=backend)[0]


def scan(u, backend, **options):
    weights = torch.linspace(-1, 1, 3 * T).view(1, 3, T)
    A = -torch.ones(u.shape[1], 3)
    return selective_scan(u, torch.ones_like(u), A, weights, weights, backend=backend, **options)


def gated(v, backend):
    q, a = torch.linspace(-1, 1, v.numel()).view(v.shape), torch.linspace(-1, 1, 2 * T).view(1, T, 2)
    return gated_linear_attention(q, q, v, a=a, backend=backend)[0]


def gates(x, backend):
    return slstm(x, torch.linspace(-1, 1, 2 * 3 * 12).view(2, 3, 12), backend=backend)[0]


CASES = {
    "delta": (delta, (1, T, 2, 3)),
    "gated": (gated, (1, T, 2, 3)),
    "scan": (scan, (1, 4, T)),
    "slstm": (gates, (1, T, 2, 4, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_torch_func_works_on_the_reference_and_the_others_say_so(name):
    op, shape = CASES[name]
    x = torch.randn(shape)
    _, slope = torch.func.jvp(lambda x: op(x, "reference"), (x,), (torch.ones_like(x),))
    assert slope.isfinite().all()
    with pytest.raises(UserError, match=r'torch.func .*backend="reference"'):
        torch.func.jvp(lambda x: op(x, "chunked"), (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(UserError, match='backend="reference"'):
        op(forward_ad.make_dual(x, x), "chunked")


def test_the_slstm_compiles_to_one_graph_with_its_gradients():
    x = torch.randn(CASES["slstm"][1], requires_grad=True)
    compiled = torch.compile(gates, fullgraph=True, backend="aot_eager")
    for run in (compiled, gates):
        y = run(x, "chunked")
        (dx,) = torch.autograd.grad(y.sin().sum(), x)
        expected = gates(x, "reference")
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(dx, torch.autograd.grad(expected.sin().sum(), x)[0])


@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_the_packed_scan_compiles_to_one_graph_given_the_longest_length(backend):
    u, offsets = torch.randn(CASES["scan"][1]), torch.tensor([0, 5, 5, T])
    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager")
    y = compiled(u, backend, cu_seqlens=offsets, max_seqlen=8)
    torch.testing.assert_close(y, scan(u, "reference", cu_seqlens=offsets))


@pytest.mark.parametrize("name", ["deltanet", "gla", "hgrn2", "mamba", "mamba2", "mlstm", "slstm"])
def test_a_model_on_the_meta_device_gives_shapes(name):
    model = Model(model_config(name, d_model=32, layers=1), 4, 5).to("meta")
    logits, _ = model(torch.zeros(2, 7, dtype=torch.long, device="meta"))
    assert logits.shape == (2, 7, 5)


def test_scan_refuses_what_is_no_tensor():
    with pytest.raises(UserError, match="u is a list, expected a tensor"):
        selective_scan([1.0], *[torch.ones(1, 1, 1)] * 4)
