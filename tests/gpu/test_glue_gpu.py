"""The small fused ops on a GPU: bfloat16, whole sizes, CUDA graphs, torch.compile; the optimiser's step."""

import copy

import pytest
import torch
import torch.nn.functional as F

from statetrack.layers import build
from statetrack.ops.adamw import recorded_adamw
from statetrack.ops.cross_entropy import cross_entropy
from statetrack.ops.embedding import embedding
from statetrack.ops.rms_norm import add_rms_norm, rms_norm
from statetrack.ops.short_convolution import convolved_split, short_convolution
from statetrack.ops.swiglu import swiglu

pytestmark = pytest.mark.gpu
ROWS, BF16 = 16_896, torch.bfloat16
WIDTHS = (128, 128, 128, 4)


def draw(*shape, dtype=BF16):
    return torch.randn(*shape, device="cuda").to(dtype)


def cases():
    """Per op: ours, PyTorch's, and inputs."""
    torch.manual_seed(0)
    tokens, targets = torch.randint(121, (2, ROWS), device="cuda")
    targets[::7] = -100
    weight = 1 + draw(128, dtype=torch.float32) / 4

    def filtered(x, w, b=0.0):
        width, T = w.shape[1], x.shape[1]
        x = F.pad(x, (0, 0, width - 1, 0))
        return F.silu(b + sum(w[:, i] * x[:, i : i + T] for i in range(width)))

    def split(x, *w):
        *parts, rest, _ = x.split([*WIDTHS, x.shape[-1] - sum(WIDTHS)], dim=-1)
        each = zip(parts, w, strict=True) if w else ((part,) for part in parts)
        return *(filtered(*given) if w else F.silu(*given) for given in each), rest

    def convolve_half(x, w, b):
        return filtered(x[..., :256], w, b), x[..., 256:]

    lengths = torch.randint(0, 41, (60,))
    bounds = F.pad(lengths.cumsum(0), (1, 0)).cuda()

    def split_packed(x, *w):
        each = [split(y, *w) for y in x.split(lengths.tolist(), dim=1)]
        return tuple(torch.cat(parts, dim=1) for parts in zip(*each, strict=True))

    taps = [draw(width, 4, dtype=torch.float32) / 2 for width in WIDTHS[:3]]
    wide, bias = draw(256, 4, dtype=torch.float32) / 2, draw(256, dtype=torch.float32)

    def add(x, y, w):
        return x + y, F.rms_norm(x + y, (128,), w, 1e-5)

    def gate(x):
        return F.silu(x[..., :512]) * x[..., 512:]

    return {
        "rms_norm": (rms_norm, lambda x, w: F.rms_norm(x, (128,), w, 1e-5), (draw(ROWS, 128), weight)),
        "add_rms_norm": (add_rms_norm, add, (draw(ROWS, 128, dtype=torch.float32), draw(ROWS, 128), weight)),
        "swiglu": (swiglu, gate, (draw(ROWS, 1024),)),
        "split": (lambda x: convolved_split(x, WIDTHS), split, (draw(512, 33, 392),)),
        "split, one part activated": (
            lambda x: convolved_split(x, WIDTHS, silu=(False, False, True)),
            lambda x: (*x.split(128, dim=-1)[:2], *split(x)[2:]),
            (draw(512, 33, 392),),
        ),
        "convolved split": (
            lambda x, *w: convolved_split(x, WIDTHS, w),
            split,
            (draw(512, 33, 392), *taps),
        ),
        "packed convolved split": (
            lambda x, *w: convolved_split(x, WIDTHS, w, cu_seqlens=bounds, max_seqlen=40),
            split_packed,
            (draw(1, int(lengths.sum()), 392), *taps),
        ),
        "convolved split with a bias": (
            lambda x, w, b: convolved_split(x, (256, 256), [w], [b]),
            convolve_half,
            (draw(512, 39, 512), wide, bias),
        ),
        "long convolution": (
            lambda x, w, b: short_convolution(x, w, b, silu=True),
            filtered,
            (draw(1, 5001, 256), wide, bias),
        ),
        "cross_entropy": (
            lambda x: cross_entropy(x, targets),
            lambda x: F.cross_entropy(x, targets),
            (3 * draw(ROWS, 121),),
        ),
        "cross_entropy of padded rows": (
            lambda x: cross_entropy(x[:, :121], targets),
            lambda x: F.cross_entropy(x[:, :121], targets),
            (3 * draw(ROWS, 128),),
        ),
        "embedding": (
            lambda w: embedding(tokens, w),
            lambda w: F.embedding(tokens, w),
            (draw(121, 128, dtype=torch.float32),),
        ),
    }


NAMES = [
    *("rms_norm", "add_rms_norm", "swiglu"),
    *("split", "split, one part activated"),
    *("convolved split", "packed convolved split", "convolved split with a bias"),
    "long convolution",
    *("cross_entropy", "cross_entropy of padded rows", "embedding"),
]


def outcome(function, given):
    leaves = [x.detach().clone().requires_grad_() for x in given]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator("cuda").manual_seed(1)
    # the same bfloat16 numbers for every precision
    gradients = [
        torch.randn(x.shape, generator=generator, device="cuda").to(BF16).to(x.dtype) for x in results
    ]
    return [x.detach() for x in results] + list(torch.autograd.grad(results, leaves, gradients))


@pytest.mark.parametrize("name", NAMES)
def test_ops_match_float64(name):
    ours, theirs, given = cases()[name]
    for a, b in zip(outcome(ours, given), outcome(theirs, [x.double() for x in given]), strict=True):
        error = ((a.double() - b).norm() / b.norm()).item()
        assert error < (3e-3 if a.dtype == BF16 else 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_ops_are_deterministic_and_can_be_captured(name):
    ours, _, given = cases()[name]
    expected = outcome(ours, given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        leaves = [x.requires_grad_() for x in given]
        results = ours(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        found = [*results, *torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results])]
    graph.replay()
    first = [x.clone() for x in found]
    graph.replay()
    torch.testing.assert_close(found, first, rtol=0, atol=0)
    torch.testing.assert_close(list(found[: len(results)]), expected[: len(results)], rtol=0, atol=0)


# torch's own compiler uses what torch itself calls deprecated
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_ops_are_whole_graphs_to_torch_compile(name):
    ours, _, given = cases()[name]
    compiled = torch.compile(ours, fullgraph=True)
    for a, b in zip(outcome(compiled, given), outcome(ours, given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["deltanet-no-conv", "deltanet", "gated-deltanet", "mamba", "transformer"])
def test_a_model_computes_what_it_computes_on_the_reference(name, monkeypatch):
    torch.manual_seed(0)
    net = build(name, vocab_size=121, layers=2).cuda()
    tokens, targets = torch.randint(121, (2, 8, 33), device="cuda")

    def gradients():
        net.zero_grad()
        logits, _ = net(tokens)
        loss = cross_entropy(logits, targets)
        loss.backward()
        return [loss.detach()] + [p.grad.clone() for p in net.parameters()]

    ours = gradients()
    monkeypatch.setenv("STATETRACK_BACKEND", "reference")
    for a, b in zip(ours, gradients(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-5)


def test_the_recorded_step_is_that_of_pytorch():
    torch.manual_seed(0)
    net = build("deltanet-no-conv", vocab_size=121).cuda()
    theirs = torch.optim.AdamW(
        net.parameters(), lr=torch.tensor(1e-2, device="cuda"), weight_decay=0.1, fused=True, capturable=True
    )
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    theirs.step()
    twin = copy.deepcopy((net, theirs))
    for p, q in zip(net.parameters(), twin[0].parameters(), strict=True):
        q.grad = p.grad.clone()  # a copy of a weight has none
    recorded = recorded_adamw(twin[1], 1.0)
    recorded.launch()
    for p, q in zip(net.parameters(), twin[0].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    theirs.step()
    for p, q in zip(net.parameters(), twin[0].parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6)
