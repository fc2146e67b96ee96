"""Copies a run's measurements to other services' trackers, each an extra. A tracker that fails
never stops a run. `Tracker` is the base class of each, and of a user's own.
"""

from midflight.trackers.tracker import TrackedRun as TrackedRun
from midflight.trackers.tracker import Tracker as Tracker
