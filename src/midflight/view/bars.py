"""A chart of spans of time on tracks, as Plotly takes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nicegui import events, ui

from midflight.view.charting import GREY, GRID

WAITING = "#8C96A1"
TRACK_HEIGHT = 38
"""Pixels of a track that has a name beside it."""
AXIS_HEIGHT = 60


@dataclass(frozen=True, slots=True)
class Bar:
    """A span of time on a track."""

    began: float
    ended: float
    text: str
    color: str
    """A span about a version has that version's colour."""
    link: str | None = None
    """The address that a click leads to."""


def figure(
    tracks: Mapping[str, Sequence[Bar]], *, height: int = TRACK_HEIGHT, named: bool = True
) -> dict[str, Any]:
    """A trace for each track, with a bar for each span. A track is `height` pixels high; without
    `named` its name is not written beside it.
    """
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": GREY}
    layout = {
        "barmode": "overlay",
        "showlegend": False,
        "height": AXIS_HEIGHT + height * max(1, len(tracks)),
        "margin": {"l": 8, "r": 8, "t": 8, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": GREY},
        "dragmode": "zoom",
        "uirevision": "kept",
        "xaxis": {**axis, "title": {"text": "seconds of the run"}},
        "yaxis": {
            **axis,
            "automargin": True,
            "fixedrange": True,
            "autorange": "reversed",
            "categoryarray": list(tracks),
            "type": "category",
            "showticklabels": named,
            "showgrid": named,
        },
    }
    return {
        "data": [_trace(name, bars) for name, bars in tracks.items()],
        "layout": layout,
        "config": {"scrollZoom": True, "displaylogo": False, "responsive": True},
    }


def _trace(name: str, bars: Sequence[Bar]) -> dict[str, Any]:
    text = [
        f"{bar.text}<br>{bar.began:.3f} to {bar.ended:.3f} s ({bar.ended - bar.began:.3f} s)"
        for bar in bars
    ]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "width": 0.7,
        "marker": {"color": [bar.color for bar in bars], "line": {"width": 0}},
        "base": [bar.began for bar in bars],
        "x": [bar.ended - bar.began for bar in bars],
        "y": [name] * len(bars),
        "hovertext": text,
        "hoverinfo": "text",
        "textposition": "none",
        "customdata": [bar.link for bar in bars],
    }


def follow(event: events.GenericEventArguments) -> None:
    """Goes where the bar that was clicked leads to."""
    for point in event.args.get("points", []):
        link = point.get("customdata")
        if link is not None:
            ui.navigate.to(link)
