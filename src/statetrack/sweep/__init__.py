"""Sweeps: many runs through one queue, on this machine or on a Ray cluster."""

from statetrack.sweep.jobs import Failure, Job, Monitor
from statetrack.sweep.local import sweep

__all__ = ["Failure", "Job", "Monitor", "sweep"]
