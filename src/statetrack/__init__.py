"""Linear recurrent networks that can track state.

    model = build("deltanet", vocab_size=121, eigenvalues="[-1,1]")     a model by the name of its mixer
    batch = task("s5-swaps").sample(4, (32, 32), generator)             sequences with labels
    o, state = delta_rule(q, k, v, beta, output_final_state=True)       a recurrence

Names are imported on first access; they need torch and numpy only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statetrack.integrations.acceleration import accelerate
    from statetrack.layers import build, model_config, register_mixer
    from statetrack.ops.checks import checked
    from statetrack.ops.delta_rule import delta_rule
    from statetrack.ops.mlstm import mlstm
    from statetrack.ops.selective_scan import selective_scan
    from statetrack.ops.short_convolution import short_convolution
    from statetrack.ops.slstm import slstm
    from statetrack.spec import RunSpec
    from statetrack.tasks import register_task, task

__version__ = "0.1.0"

__all__ = [
    "RunSpec",
    "accelerate",
    "build",
    "checked",
    "delta_rule",
    "mlstm",
    "model_config",
    "register_mixer",
    "register_task",
    "selective_scan",
    "short_convolution",
    "slstm",
    "task",
]

_HOMES = {"build": "layers", "model_config": "layers", "register_mixer": "layers"}
_HOMES |= {"RunSpec": "spec", "register_task": "tasks", "task": "tasks"}
_HOMES |= {"accelerate": "integrations.acceleration", "checked": "ops.checks"}
_HOMES |= {op: f"ops.{op}" for op in ("delta_rule", "mlstm", "selective_scan", "short_convolution", "slstm")}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f"statetrack.{_HOMES[name]}"), name)
        return value
    if name in {home.partition(".")[0] for home in _HOMES.values()}:
        return import_module(f"statetrack.{name}")
    raise AttributeError(f"module 'statetrack' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
