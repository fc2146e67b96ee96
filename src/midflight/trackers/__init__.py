"""Copies of what a run measures to other people's trackers, each an extra; one that fails never
stops a run. `Tracker` is what each is, and what a user's own derives from.
"""

from midflight.trackers.tracker import TrackedRun as TrackedRun
from midflight.trackers.tracker import Tracker as Tracker
