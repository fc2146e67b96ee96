"""What the checks before a run find in a configuration, asked in this process."""

from __future__ import annotations

from collections.abc import Callable

from midflight.config import Config
from midflight.run.launcher.checks.check import About, Findings, Plan
from midflight.run.launcher.checks.table import ask, findings, rows_of


def found_in(config: Config, *, doing: Callable[[str], None] = lambda _: None) -> Findings:
    """What a start asks of tasks, code and machine, without torch, which is a process of its own."""
    plan = Plan(config=config, doing=doing)
    rows = [check for check in rows_of(plan) if check.in_trial or check.about is About.MACHINE]
    found = ask(plan, [check for check in rows if check.name != "torch"])
    return findings(plan, found)
