"""The page of a run."""

from __future__ import annotations

from nicegui import ui

from midflight.view.visit import Visit


def draw(visit: Visit) -> None:
    ui.label(visit.run.describe().name)
