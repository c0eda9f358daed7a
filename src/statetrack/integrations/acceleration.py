"""`accelerate(model)`: the linear layers of a model of transformers, computed by the ops of this library.

Layers are found by the names their `forward` calls, not by their class: Gated DeltaNet in Qwen3-Next, Qwen3.5
and OLMo Hybrid, the first Mamba in Mamba, Falcon Mamba and Jamba. Each such layer gets a copy of its own
`forward` in which these names are those of our ops. Weights, caches and all other models stay as they are.
"""

import inspect
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from statetrack.errors import UserError
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.selective_scan import selective_scan
from statetrack.ops.short_convolution import short_convolution

__all__ = ["Acceleration", "accelerate"]


class Acceleration:
    """What `accelerate` changed: `layers` are the names of the layers; `undo()` gives them back.

    Also a context manager, which undoes it at the end.
    """

    def __init__(self, layers: dict[str, nn.Module]):
        self._modules = layers

    @property
    def layers(self) -> list[str]:
        """The names of the accelerated layers in the model."""
        return list(self._modules)

    def undo(self) -> None:
        """Let every layer run its own `forward` again. A second call changes nothing."""
        for layer in self._modules.values():
            layer.__dict__.pop("forward", None)
        self._modules = {}

    def __enter__(self) -> "Acceleration":
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"Acceleration(layers={self.layers})"


def accelerate(model: nn.Module) -> Acceleration:
    """Run the Gated DeltaNet and Mamba layers of a loaded `transformers` model on the ops of this library.

        model = AutoModelForCausalLM.from_pretrained(folder)
        statetrack.accelerate(model)                  # to stay
        with statetrack.accelerate(model): ...        # inside the block only

    The logits stay the same but for rounding, about 1e-6 in float32; caches, `generate` and training work as
    before. On a CPU transformers computes convolution and recurrence in plain PyTorch; ours take a quarter of
    that time or less on long inputs. The projections stay as they are. Only this model is changed, by the
    attribute `forward` of its layers; `undo()` of the result deletes it.
    """
    layers = {name: layer for name, layer in model.named_modules() if _recurrences(layer)}
    if not layers:
        raise UserError(
            f"accelerate: {type(model).__name__} has no layer that this library can run, expected a model of "
            f"transformers whose layers call {', '.join(RECURRENCES)}: Qwen3-Next, Qwen3.5, OLMo Hybrid, "
            "Mamba."
        )
    for name, layer in layers.items():
        if "forward" in layer.__dict__:
            raise UserError(
                f"accelerate: the layer {name} has a `forward` of its own, set by an earlier call or by "
                "hooks of another library. Undo that first."
            )
    for layer in layers.values():
        layer.forward = MethodType(_on_our_ops(type(layer).forward), layer)
    return Acceleration(layers)


def _gated_delta_rule(original: Callable) -> Callable:
    """`torch_chunk_gated_delta_rule` and `torch_recurrent_gated_delta_rule`, by `delta_rule`."""

    def gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        given: dict[str, Any] = {
            "g": g,
            "initial_state": initial_state,
            "output_final_state": output_final_state,
            "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        }
        if options.get("cu_seqlens") is not None:  # the convolution before it knows no boundaries
            return original(query, key, value, beta=beta, **given, **options)
        return delta_rule(query, key, value, beta, **given)

    return gated_delta_rule


def _selective_scan(original: Callable) -> Callable:
    """`mamba_selective_scan`, by `selective_scan`."""

    def scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **options: Any,
    ) -> Any:
        rest = A, B, C, D, z, delta_bias, delta_softplus, return_last_state
        return selective_scan(hidden_states, dt, *rest, eigenvalues="[0,1]")

    return scan


def _convolution(original: Callable) -> Callable:
    """`causal_conv1d_fn`, where the activation is SiLU, by `short_convolution`."""

    def convolution(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **options: Any,
    ) -> Tensor:
        if activation not in ("silu", "swish") or options.get("seq_idx") is not None:
            return original(hidden_states, weight, bias, activation=activation, **options)
        # time before channels
        return short_convolution(hidden_states.mT, weight, bias, silu=True).mT

    return convolution


# by name, functions of what has this name in the module of a layer
RECURRENCES = {
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _gated_delta_rule,
    "mamba_selective_scan": _selective_scan,
}
REPLACEMENTS = {**RECURRENCES, "causal_conv1d_fn": _convolution}


def _recurrences(layer: nn.Module) -> list[str]:
    """The recurrences that the `forward` of a layer's class calls by a name of its module."""
    forward = inspect.unwrap(type(layer).forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return [name for name in RECURRENCES if name in names and name in forward.__globals__]


def _on_our_ops(function: Any) -> FunctionType:
    """A copy of a function whose recurrences are ours, under the decorators that it has."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return _copy(function, {**function.__globals__, **dict(_ours(function))}, function.__closure__)
    ours = CellType(_on_our_ops(inner))
    cells = tuple(ours if cell.cell_contents is inner else cell for cell in function.__closure__)
    return _copy(function, function.__globals__, cells)


def _ours(function: Any) -> Iterator[tuple[str, Callable]]:
    for name, replacement in REPLACEMENTS.items():
        if name in function.__code__.co_names and name in function.__globals__:
            yield name, replacement(function.__globals__[name])


def _copy(function: Any, names: dict[str, Any], closure: tuple[CellType, ...] | None) -> FunctionType:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__doc__ = function.__kwdefaults__, function.__doc__
    return copy
