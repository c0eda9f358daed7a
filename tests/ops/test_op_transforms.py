"""The recurrences under torch.compile, torch.func, forward-mode derivatives and on the meta device."""

import pytest
import torch
from torch.autograd import forward_ad

from statetrack.errors import UserError
from statetrack.layers.model import Model
from statetrack.layers.presets import PRESETS, model_config
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


def test_the_chunked_scan_compiles_to_one_graph_with_its_gradients():
    """300 steps: several chunks, whose loops the graph must not contain."""
    generator = torch.Generator().manual_seed(0)
    u, B, z = (torch.randn(2, n, 300, generator=generator) for n in (4, 3, 4))
    leaves = [x.requires_grad_() for x in (u, B, z, -torch.rand(4, 3, generator=generator))]

    def loss(backend):
        def of(u, B, z, A):
            y, h = selective_scan(
                u, u.sigmoid(), A, B, B, z=z, return_last_state=True, eigenvalues="[-1,1]", backend=backend
            )
            return y.sin().sum() + h.square().sum()

        return of

    compiled = torch.compile(loss("chunked"), fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(*leaves), leaves)
    torch.testing.assert_close(
        actual, torch.autograd.grad(loss("native")(*leaves), leaves), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_ops_of_the_chunked_scan_describe_their_results(groups, transposed):
    """Fake and real implementations agree in shape, dtype and strides, so torch.compile can trust them."""
    u, delta = torch.rand(2, 2, 4, 20).unbind()
    if transposed:
        u, delta = (x.mT.contiguous().mT for x in (u, delta))
    A, B, C = -torch.rand(4, 3), torch.randn(2, groups, 3, 20), torch.randn(4, 3)
    inputs = u, delta, A, B, C, torch.ones(4), u, torch.ones(4)
    utils = ("test_schema", "test_faketensor")
    op = torch.ops.statetrack.chunked_scan_forward.default
    torch.library.opcheck(op, (*inputs, torch.ones(2, 4, 3), True, True, True), test_utils=utils)
    out, h, checkpoints = op(*inputs, torch.ones(2, 4, 3), True, True, True)
    op = torch.ops.statetrack.chunked_scan_backward.default
    for needed in ([True] * 9, [True, False] * 4 + [False]):
        torch.library.opcheck(op, (*inputs, checkpoints, out, h, True, True, needed), test_utils=utils)


@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_the_packed_scan_compiles_to_one_graph_given_the_longest_length(backend):
    u, offsets = torch.randn(CASES["scan"][1]), torch.tensor([0, 5, 5, T])
    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager")
    y = compiled(u, backend, cu_seqlens=offsets, max_seqlen=8)
    torch.testing.assert_close(y, scan(u, "reference", cu_seqlens=offsets))


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_of_every_mixer_is_one_graph(name):
    """Traced only: what the graph computes is compared above, and in the tests of the ops."""
    model = Model(model_config(name, d_model=16, layers=1), 4, 4)
    tokens = torch.arange(10).view(2, 5) % 4
    logits, _ = torch.compile(model, fullgraph=True, backend="eager")(tokens)
    torch.testing.assert_close(logits, model(tokens)[0])
    torch.compiler.reset()


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_on_the_meta_device_gives_shapes_of_logits_states_and_gradients(name):
    model = Model(model_config(name, d_model=32, layers=1, half_stream=True), 4, 4).to("meta")
    tokens = torch.zeros(2, 7, dtype=torch.long, device="meta")
    logits, state = model(tokens)
    assert logits.shape == (2, 7, 4)
    assert model(tokens[:, :1], state)[0].shape == (2, 1, 4)
    loss, _ = model(tokens, targets=tokens)
    loss.backward()
    assert all(x.grad is not None and x.grad.is_meta for x in model.parameters())
