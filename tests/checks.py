"""What the checks before a run find in a configuration, asked in this process."""

from __future__ import annotations

from collections.abc import Callable

from midflight.config import Config
from midflight.run.launcher.checks.check import About, Findings, Plan
from midflight.run.launcher.checks.table import BESIDE_TRIAL, IN_TRIAL, ask, findings


def found_in(config: Config, *, doing: Callable[[str], None] = lambda _: None) -> Findings:
    """What a start asks of room, tasks and code. Torch is not asked for devices, which takes a process."""
    plan = Plan(config, doing=doing)
    room = [check for check in BESIDE_TRIAL if check.about is About.ROOM]
    return findings(plan, ask(plan, [*room, *IN_TRIAL]))
