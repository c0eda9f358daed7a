"""Trained trackers rounded to exact ones: read the learned reflections, round them, write them back."""

from statetrack.snapping.snap import HeadReport, Snapped, first_error, snap

__all__ = ["HeadReport", "Snapped", "first_error", "snap"]
