"""The precision of a run's layers."""

import torch

from statetrack.spec import RunSpec


def autocast(spec: RunSpec, device: torch.device) -> torch.autocast:
    """The spec's precision, for training and evaluation alike."""
    return torch.autocast(device.type, torch.bfloat16, enabled=spec.training.precision == "bfloat16")
