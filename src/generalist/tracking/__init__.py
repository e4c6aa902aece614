"""Trackers: a run's curves, images and settings in TensorBoard, Weights & Biases, MLflow, or a tracker of your own.

`metrics.jsonl` is the record of a run and is always written. A tracker is a copy for people to look at: if it fails,
the run goes on with a warning.
"""

from generalist.tracking.base import Tracker, Tracking, flat_numbers, flat_settings, grid
from generalist.tracking.names import TRACKERS, make_trackers

__all__ = ["TRACKERS", "Tracker", "Tracking", "flat_numbers", "flat_settings", "grid", "make_trackers"]
