"""The delta rule's kernels on a real GPU: bfloat16, long sequences, graphs, torch.compile, error bounds."""

import pytest
import torch
from delta_inputs import OPTIONS, SPREAD, largest_error, random_inputs, run

from statetrack.ops.delta_rule import delta_rule

pytestmark = pytest.mark.gpu

SHAPES = [
    (4, 1, 2, 32, 32),
    (4, 32, 4, 32, 32),
    (2, 33, 2, 24, 60),
    (70, 129, 2, 64, 64),
    (1, 300, 2, 128, 128),
    (2, 640, 3, 64, 128),
    (70, 300, 2, 128, 128),
    (33, 200, 2, 128, 128),
    (1, 130, 1, 256, 256),
    (500, 39, 4, 32, 32),
    (3, 128, 2, 24, 32),
    (5, 33, 2, 32, 32),
]
PAIRS = (1, 300, 2, 72, 100)  # few sequences of bfloat16, which are swept by two chunks at a time


def on_gpu(inputs, dtype=torch.float64):
    return {name: x.to(dtype).double().cuda() for name, x in inputs.items()}


def relative(actual, expected):
    return float((actual.detach().double() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_chunked_in_float64(shape, dtype):
    """One kernel each way for short sequences, chunks for the others, with few and with many of them."""
    B, T, H, K, V = shape
    inputs = on_gpu(random_inputs(B, T, H, K, V), dtype)
    options = {"use_qk_l2norm_in_kernel": True}
    expected, actual = run(inputs, "chunked", **options), run(inputs, "triton", dtype, **options)
    # halves round what they keep and return; float32 loses sixteen-bit products in outputs and gradients
    limit = {torch.float32: 5e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}[dtype]
    for name, value in expected.items():
        assert relative(actual[name], value) < limit, name


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize(("change", "answer_only"), SPREAD)
def test_sizes_far_apart(change, answer_only, l2norm):
    """Products of rounded parts must not lose the range of float32."""
    options = {"use_qk_l2norm_in_kernel": l2norm, "answer_only": answer_only}
    for shape in (
        (3, 33, 2, 32, 32),
        (3, 40, 2, 32, 32),
        (3, 100, 2, 32, 32),
        (2, 200, 2, 32, 32),
        (70, 200, 2, 32, 32),
    ):
        inputs = on_gpu(random_inputs(*shape))
        change(inputs)
        actual, expected = run(inputs, "triton", torch.float32, **options), run(inputs, "chunked", **options)
        assert largest_error(actual, expected) < 1e-4, shape


@pytest.mark.parametrize("bounds", [None, [0, 0, 5, 150]])
@pytest.mark.parametrize(("given_inputs", "options"), OPTIONS)
def test_every_option(bounds, given_inputs, options):
    inputs = on_gpu(random_inputs(B=1, T=150, H=2, K=20, V=36, sequences=3 if bounds else 1, **given_inputs))
    if bounds:
        options = options | {"cu_seqlens": torch.tensor(bounds, device="cuda")}
    actual = run(inputs, "triton", torch.float32, **options)
    for name, value in run(inputs, "chunked", **options).items():
        assert relative(actual[name], value) < 5e-5, name


@pytest.mark.parametrize(("given_inputs", "options"), OPTIONS)
def test_every_option_of_pairs(given_inputs, options):
    B, T, H, K, V = PAIRS
    inputs = on_gpu(random_inputs(B=B, T=T, H=H, K=K, V=V, **given_inputs), torch.bfloat16)
    actual = run(inputs, "triton", torch.bfloat16, **options)
    for name, value in run(inputs, "chunked", **options).items():
        assert relative(actual[name], value) < 2e-2, name


@pytest.mark.parametrize("bounds", [[0, 0, 5, 150], [0, 33, 33, 66, 99, 132, 150]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_sequences_known_to_be_short(bounds, dtype):
    """One kernel each way where no sequence has more than 128 steps, chunks where one may."""
    inputs = on_gpu(random_inputs(B=1, T=150, H=2, K=20, V=32), dtype)
    offsets = torch.tensor(bounds, device="cuda")
    options = {
        "use_qk_l2norm_in_kernel": True,
        "cu_seqlens": offsets,
        "max_seqlen": max(offsets.diff().tolist()),
    }
    expected, actual = run(inputs, "chunked", **options), run(inputs, "triton", dtype, **options)
    for name, value in expected.items():
        assert relative(actual[name], value) < (5e-5 if dtype == torch.float32 else 1.5e-2), name


@pytest.mark.parametrize("shape", [*SHAPES[1:], PAIRS])
def test_the_same_inputs_give_the_same_bits(shape):
    inputs = random_inputs(*shape)
    leaves = {name: x.bfloat16().cuda() for name, x in inputs.items()}
    first, *others = [run(leaves, "triton", torch.bfloat16) for _ in range(3)]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def five_keys(T, d, dtype):
    """The group-word regime: five different keys over and over, beta = 1.99."""
    inputs = random_inputs(B=2, T=T, H=2, K=d, V=d, beta=1.99)
    index = torch.randint(5, (T,), generator=torch.Generator().manual_seed(1))
    inputs["k"] = inputs["k"][:, index]
    return on_gpu(inputs, dtype)


@pytest.mark.parametrize("T", [32, 128, 512, 2048])
def test_error_near_reflections_in_float32(T):
    inputs = five_keys(T, 32, torch.float32)
    options = {"use_qk_l2norm_in_kernel": True}
    expected, actual = run(inputs, "chunked", **options), run(inputs, "triton", torch.float32, **options)
    for name, value in expected.items():
        assert relative(actual[name], value) < 1e-4, name


@pytest.mark.parametrize(("T", "limit"), [(512, 0.038), (2048, 0.0635)])
def test_error_near_reflections_in_bfloat16_is_under_half_of_flash_linear_attentions(T, limit):
    inputs = five_keys(T, 32, torch.bfloat16)
    inputs["beta"] = torch.full_like(inputs["beta"], 1.99)
    leaves = {name: x if name == "beta" else x.bfloat16() for name, x in inputs.items()}
    expected, _ = delta_rule(**inputs, use_qk_l2norm_in_kernel=True, backend="chunked")
    leaves["beta"] = leaves["beta"].float()
    actual, _ = delta_rule(**leaves, use_qk_l2norm_in_kernel=True, backend="triton")
    assert relative(actual, expected) < limit


@pytest.mark.parametrize("T", [39, 200])
def test_a_graph_replays_forward_and_backward(T):
    leaves = {name: x.float().cuda().requires_grad_() for name, x in random_inputs(4, T, 2, 32, 32).items()}

    def step():
        o, _ = delta_rule(**leaves, use_qk_l2norm_in_kernel=True)
        return [o, *torch.autograd.grad(o.square().sum(), list(leaves.values()))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [x.clone() for x in step()]
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = step()
        graph.replay()
        stream.synchronize()
    for actual, value in zip(results, expected, strict=True):
        assert torch.equal(actual, value)


# torch's own compiler uses what torch itself calls deprecated
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("T", [32, 200])
def test_torch_compile_takes_the_ops(T):
    leaves = {name: x.float().cuda().requires_grad_() for name, x in random_inputs(2, T, 2, 32, 32).items()}

    def loss(q, k, v, beta):
        o, S = delta_rule(q, k, v, beta, beta_from_logits=2.0, output_final_state=True)
        return o.square().sum() + S.square().sum()

    expected = torch.autograd.grad(loss(*leaves.values()), list(leaves.values()))
    compiled = torch.compile(loss, fullgraph=True)
    actual = torch.autograd.grad(compiled(*leaves.values()), list(leaves.values()))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def gates_of(kind, B, T, H, K):
    generator = torch.Generator().manual_seed(5)
    s = torch.rand(B, T, H, *((K,) if "channel" in kind else ()), generator=generator, dtype=torch.float64)
    if kind.startswith("signed"):
        s[:, ::9] = 0.5  # a = 0
        return {"a": 2 * s - 1}
    return {"g": s.log() / 8}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 33, 2, 24, 60), (1, 300, 2, 128, 128), (70, 130, 2, 64, 64)])
@pytest.mark.parametrize("kind", ["per channel", "signed per channel", "signed per head"])
def test_gates_match_chunked_in_float64(kind, shape, dtype):
    B, T, H, K, V = shape
    inputs = on_gpu(random_inputs(B, T, H, K, V, state=True), dtype)
    inputs |= on_gpu(gates_of(kind, B, T, H, K), dtype)
    options = {"use_qk_l2norm_in_kernel": True}
    expected, actual = run(inputs, "chunked", **options), run(inputs, "triton", dtype, **options)
    limit = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2}[dtype]
    for name, value in expected.items():
        if not value.any():  # dinitial_state behind a gate of 0, which the kernels take as 1e-20
            assert actual[name].abs().max() < 1e-15, name
            continue
        # the gradient of a gate sums products of rounded terms over all of a state, that of a beta over a row
        factor = 5 if name in ("da", "dg") else 1.5 if name == "dbeta" else 1
        assert relative(actual[name], value) < factor * limit, name
