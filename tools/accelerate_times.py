"""Times of one linear layer of transformers, as it is and under `statetrack.accelerate`.

    python tools/accelerate_times.py [width ...] [--threads N]

CPU time of one thread, so that other programs on the machine count little; with more threads, elapsed time,
which means something on idle cores only. The smallest of several calls, ours and theirs in turn. The matrix
products of a layer, which `accelerate` leaves alone, are timed by themselves: no recurrence can make
the layer faster than they are.
"""

import argparse
import time
import warnings
from collections.abc import Callable

import torch
import transformers
from torch import nn

import statetrack

T = 2048
CALLS = 15
SHARED = {"num_hidden_layers": 2, "vocab_size": 64, "bos_token_id": None, "eos_token_id": None}
FAMILIES = ("olmo_hybrid", "qwen3_next", "qwen3_5_text", "mamba")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("widths", nargs="*", type=int, default=[128, 256, 512])
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    print("| layer | width | products | transformers | accelerated | ratio | ratio without products |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for width in given.widths:
        for family in FAMILIES:
            theirs, ours, products = measured(family, width)
            rest = (theirs - products) / (ours - products)
            times = " | ".join(f"{seconds * 1e3:.1f} ms" for seconds in (products, theirs, ours))
            print(f"| {family} | {width} | {times} | {theirs / ours:.1f} | {rest:.1f} |", flush=True)


@torch.no_grad()
def measured(family: str, width: int) -> tuple[float, float, float]:
    """Seconds of one layer as it is, accelerated, and of its matrix products alone."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, hidden_size=width, **SHARED, **options(family, width))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with statetrack.accelerate(model) as found:
        layer = model.get_submodule(found.layers[0])
    x = torch.randn(1, T, width)
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    inputs = [torch.randn(1, T, linear.in_features) for linear in linears]
    theirs, ours, products = [], [], []
    for _ in range(CALLS + 2):
        theirs.append(seconds_of(lambda: layer(x)))
        with statetrack.accelerate(model):
            ours.append(seconds_of(lambda: layer(x)))
        products.append(seconds_of(lambda: [linear(y) for linear, y in zip(linears, inputs, strict=True)]))
    return min(theirs[2:]), min(ours[2:]), min(products[2:])


def options(family: str, width: int) -> dict:
    """Heads 64 wide; OLMo Hybrid has keys of 48 and values of 96, Qwen two value heads for a key head."""
    if family == "mamba":
        return {}
    heads = width // 64
    found = {
        "intermediate_size": 2 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads if family == "olmo_hybrid" else 2 * heads,
        "layer_types": ["linear_attention", "full_attention"],
        "pad_token_id": None,
    }
    if family != "olmo_hybrid":
        found |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}
    if family == "qwen3_next":
        found |= {"num_experts": 0, "mlp_only_layers": [0, 1]}
    return found


def seconds_of(call: Callable[[], object]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    call()
    return clock() - start


if __name__ == "__main__":
    main()
