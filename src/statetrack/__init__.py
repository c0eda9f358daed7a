"""Linear recurrent networks that can track state.

    trained = train("parity-dense", "deltanet", steps=500)              train a model; its accuracy by length
    spec, model = load_run(trained.folder)                              the model of a finished run
    model = build("deltanet", vocab_size=121, eigenvalues="[-1,1]")     a model by the name of its mixer
    layer = DeltaNet(DeltaNetConfig(heads=4), d_model=128)              a layer for a model of your own
    batch = task("s5-swaps").sample(4, (32, 32), generator)             sequences with labels
    o, state = delta_rule(q, k, v, beta, output_final_state=True)       a recurrence

Names are imported on first access; they need torch and numpy only. In submodules: `statetrack.compat.fla` and
`statetrack.compat.mamba_ssm` (functions of other libraries on these ops), `statetrack.lm` (language models),
`statetrack.automata` (languages and what can track them), `statetrack.run.run` (one spec, one folder).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statetrack.automata import DFA, analyse, compile_dfa, explain, factor
    from statetrack.errors import UserError
    from statetrack.integrations.acceleration import accelerate
    from statetrack.layers import (
        GLA,
        HGRN2,
        KDA,
        MLSTM,
        SLSTM,
        Attention,
        AttentionConfig,
        DeltaNet,
        DeltaNetConfig,
        GLAConfig,
        HGRN2Config,
        KDAConfig,
        Mamba,
        Mamba2,
        Mamba2Config,
        Mamba3,
        Mamba3Config,
        MambaConfig,
        Mixer,
        MixerConfig,
        MLSTMConfig,
        Model,
        ModelConfig,
        Packing,
        SLSTMConfig,
        build,
        count_parameters,
        extended_range,
        model_config,
        register_mixer,
    )
    from statetrack.lm.generate import generate
    from statetrack.lm.models import open_model
    from statetrack.ops.checks import checked
    from statetrack.ops.delta_rule import delta_rule
    from statetrack.ops.gated_linear_attention import gated_linear_attention
    from statetrack.ops.generalised_delta_rule import generalised_delta_rule
    from statetrack.ops.mlstm import mlstm
    from statetrack.ops.selective_scan import selective_scan
    from statetrack.ops.short_convolution import short_convolution
    from statetrack.ops.slstm import slstm
    from statetrack.run import load_run
    from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
    from statetrack.tasks import TASKS, Batch, Task, register_task, task
    from statetrack.trained import TrainedModel, train
    from statetrack.training import Options, evaluate

__version__ = "0.1.0"

__all__ = [
    "DFA",
    "GLA",
    "HGRN2",
    "KDA",
    "MLSTM",
    "SLSTM",
    "TASKS",
    "Attention",
    "AttentionConfig",
    "Batch",
    "DeltaNet",
    "DeltaNetConfig",
    "EvaluationConfig",
    "GLAConfig",
    "HGRN2Config",
    "KDAConfig",
    "MLSTMConfig",
    "Mamba",
    "Mamba2",
    "Mamba2Config",
    "Mamba3",
    "Mamba3Config",
    "MambaConfig",
    "Mixer",
    "MixerConfig",
    "Model",
    "ModelConfig",
    "Options",
    "Packing",
    "RunSpec",
    "SLSTMConfig",
    "Task",
    "TrainedModel",
    "TrainingConfig",
    "UserError",
    "accelerate",
    "analyse",
    "build",
    "checked",
    "compile_dfa",
    "count_parameters",
    "delta_rule",
    "evaluate",
    "explain",
    "extended_range",
    "factor",
    "gated_linear_attention",
    "generalised_delta_rule",
    "generate",
    "load_run",
    "mlstm",
    "model_config",
    "open_model",
    "register_mixer",
    "register_task",
    "selective_scan",
    "short_convolution",
    "slstm",
    "task",
    "train",
]

_MODULES = {
    "automata": "DFA analyse compile_dfa explain factor",
    "errors": "UserError",
    "integrations.acceleration": "accelerate",
    "layers": "GLA HGRN2 KDA MLSTM SLSTM Attention AttentionConfig DeltaNet DeltaNetConfig GLAConfig "
    "HGRN2Config KDAConfig MLSTMConfig Mamba Mamba2 Mamba2Config Mamba3 Mamba3Config MambaConfig Mixer "
    "MixerConfig Model ModelConfig Packing SLSTMConfig build count_parameters extended_range model_config "
    "register_mixer",
    "lm.generate": "generate",
    "lm.models": "open_model",
    "ops.checks": "checked",
    **{f"ops.{op}": op for op in ("delta_rule", "gated_linear_attention", "generalised_delta_rule")},
    **{f"ops.{op}": op for op in ("mlstm", "selective_scan", "short_convolution", "slstm")},
    "run": "load_run",
    "spec": "EvaluationConfig RunSpec TrainingConfig",
    "tasks": "TASKS Batch Task register_task task",
    "trained": "TrainedModel train",
    "training": "Options evaluate",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
_SUBMODULES = {module.partition(".")[0] for module in _MODULES} | {"compat"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f"statetrack.{_HOMES[name]}"), name)
        return value
    if name in _SUBMODULES:
        return import_module(f"statetrack.{name}")
    raise import_module("statetrack.peer_names").missing_name(name, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
