"""Trained trackers rounded to exact ones: read the learned reflections, round them, write them back."""

from statetrack.snapping.snap import Check, ExactStates, HeadReport, Snapped, check, snap

__all__ = ["Check", "ExactStates", "HeadReport", "Snapped", "check", "snap"]
