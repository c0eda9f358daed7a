"""statetrack: linear recurrent networks that can track state.

Importing this package loads torch and numpy, nothing more.
"""

from statetrack.layers import build, model_config
from statetrack.ops import checked, delta_rule, selective_scan
from statetrack.spec import RunSpec
from statetrack.tasks import task

__version__ = "0.1.0"

__all__ = ["RunSpec", "build", "checked", "delta_rule", "model_config", "selective_scan", "task"]
