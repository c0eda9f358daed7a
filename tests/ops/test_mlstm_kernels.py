"""The mLSTM against `mlstm_kernels`, the package of its authors: op, states, gradients, and the layer."""

import pytest
import torch
import torch.nn.functional as F

from statetrack.layers.mlstm import MLSTM, MLSTMConfig
from statetrack.ops.gated_linear_attention import BACKENDS as gated_backends
from statetrack.ops.gated_linear_attention import gated_linear_attention
from statetrack.ops.mlstm import JOINED_BACKENDS, MLSTMCell, mlstm

# PyTorch's own, when the package loads torch.compile
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
T, K = 128, 8  # their chunks are 64 long, and have to divide the length


def inputs():
    g = torch.Generator().manual_seed(0)
    shapes = [(2, T, 3, K), (2, T, 3, K), (2, T, 3, 5), (2, T, 3), (2, T, 3)]
    q, k, v, i, f = (torch.randn(shape, generator=g) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v, i, f + 2)]


def heads_first(*tensors):
    """They put heads before time."""
    return [x.transpose(1, 2) for x in tensors]


def close(actual, expected, tolerance=1e-5):
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_outputs_states_and_gradients_are_those_of_the_authors_kernel(backend):
    from mlstm_kernels.torch.chunkwise.native import mlstm_chunkwise__native_autograd

    given = inputs()
    expected, (C, n, m) = mlstm_chunkwise__native_autograd(*heads_first(*given), return_last_states=True)
    expected = expected.transpose(1, 2)
    h, state = mlstm(*given, backend=backend)
    close(h, expected)
    # they scale q, and we k; their m starts at 0, and ours at -inf: both cancel in C exp(m)
    close(state.C * state.m.exp()[..., None, None] * K**0.5, C * m.exp()[..., None])
    close(state.n * state.m.exp()[..., None] * K**0.5, n * m.exp())
    weights = torch.arange(h.numel()).view(h.shape).cos()
    theirs = torch.autograd.grad((expected * weights).sum(), given)
    for ours, other in zip(torch.autograd.grad((h * weights).sum(), given), theirs, strict=True):
        close(ours, other, 3e-5)  # in float32 theirs are within 1e-5 of float64, and ours within 4e-6


def test_a_state_of_theirs_is_carried_on_here():
    from mlstm_kernels.torch.chunkwise.native import mlstm_chunkwise__native_autograd

    given = [x.detach() for x in inputs()]
    half = T // 2
    expected = mlstm_chunkwise__native_autograd(*heads_first(*given)).transpose(1, 2)
    first = heads_first(*(x[:, :half] for x in given))
    _, (C, n, m) = mlstm_chunkwise__native_autograd(*first, return_last_states=True)
    state = MLSTMCell(C * K**-0.5, n * K**-0.5, m[..., 0])
    h, _ = mlstm(*(x[:, half:] for x in given), initial_state=state)
    close(h, expected[:, half:])


def test_without_the_normaliser_it_is_their_sigmoid_input_gate():
    """mLSTMsig (Beck et al. 2025), as one call of gated linear attention, with gradients."""
    from mlstm_kernels.torch.parallel.native_siging import mlstm_siging_parallel__native_autograd

    q, k, v, i, f = given = inputs()
    expected = mlstm_siging_parallel__native_autograd(*heads_first(*given), normalize=False).transpose(1, 2)
    h, _ = gated_linear_attention(q, torch.sigmoid(i)[..., None] * k, v, F.logsigmoid(f))
    close(h, expected)
    weights = torch.arange(h.numel()).view(h.shape).cos()
    theirs = torch.autograd.grad((expected * weights).sum(), given)
    for ours, other in zip(torch.autograd.grad((h * weights).sum(), given), theirs, strict=True):
        close(ours, other, 3e-5)  # in float32 theirs are within 1e-5 of float64, and ours within 4e-6


def their_mlstm(q, k, v, i, f, state, signed):
    """A backend of `mlstm` on their kernel."""
    from mlstm_kernels.torch.chunkwise.native import mlstm_chunkwise__native_autograd

    h, (C, n, m) = mlstm_chunkwise__native_autograd(*heads_first(q, k, v, i, f), return_last_states=True)
    return h.transpose(1, 2), MLSTMCell(C, n, m[..., 0])


def their_joined_mlstm(qkv, i, f, state, signed):
    return their_mlstm(*qkv.unbind(2), i, f, state, signed)


def their_gated_attention(q, k, v, a, angle, initial_state, cu_seqlens, scale):
    """A backend of `gated_linear_attention` on theirs: the input gate, which is in k, is 1 in theirs."""
    from mlstm_kernels.torch.parallel.native_siging import mlstm_siging_parallel__native_autograd

    k, f = scale * k.shape[-1] ** 0.5 * k, torch.logit(a)
    given = heads_first(q, k, v, torch.full_like(f, 40.0), f)
    h = mlstm_siging_parallel__native_autograd(*given, normalize=False)
    return h.transpose(1, 2), k.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1])


@pytest.mark.parametrize("normaliser", [True, False])
def test_the_layer_gives_the_same_on_their_kernels(monkeypatch, normaliser):
    torch.manual_seed(0)
    layer = MLSTM(MLSTMConfig(heads=2, normaliser=normaliser), d_model=16)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    x = torch.randn(2, T, 16)
    ours, _ = layer(x)
    for name in ("chunked", "native"):
        monkeypatch.setitem(JOINED_BACKENDS, name, f"{__name__}:their_joined_mlstm")
        monkeypatch.setitem(gated_backends, name, f"{__name__}:their_gated_attention")
    theirs, _ = layer(x)
    assert not torch.equal(ours, theirs), "other kernels have other rounding errors"
    close(ours, theirs)
