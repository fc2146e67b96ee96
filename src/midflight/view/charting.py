"""The colours and options that all charts share. People tell the colours apart however they see,
and the options fit a light and a dark page.
"""

from typing import Any

from midflight.types import Version

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A6D3B", "#7F7F7F")
"""Okabe and Ito's palette without its black and its yellow, which cannot be seen on a dark and on a
light page. The last two colours are for more than six lines.
"""
VERSION_COLORS = COLORS[:6]
GREY = "#808080"
"""A grey for what the page's style gives no colour of its own, on white and on black."""
GRID = "rgba(128,128,128,0.25)"
SHORT = "v => v && Math.abs(v) < 0.001 ? v.toExponential(1) : v.toLocaleString('en')"
"""The numbers of an axis, as a function of the browser."""
DASHES = ("solid", "dashed", "dotted")


def version_color(version: Version) -> str:
    """The colour of a version, the same on every page. Versions that are near each other differ."""
    return VERSION_COLORS[version % len(VERSION_COLORS)]


def channels(color: str) -> str:
    """`#0072B2` as `0 114 178`."""
    return " ".join(str(int(color[at : at + 2], 16)) for at in (1, 3, 5))


def axes(*, x: str, y: str = "", kind: str = "value", **more: Any) -> dict[str, Any]:
    """The options that all charts share. `x` and `y` name the axes, and `kind` is that of the x
    axis. `more` is added to the options and replaces some.
    """
    text = {"color": GREY}
    line: dict[str, Any] = {"lineStyle": {"color": GREY}}
    horizontal: dict[str, Any] = {
        "type": kind,
        "name": x,
        "nameLocation": "middle",
        "nameGap": 22,
        "axisLabel": text,
        "axisLine": line,
        "nameTextStyle": text,
    }
    if kind == "value":
        horizontal |= {"splitLine": {"show": False}, "min": "dataMin", "max": "dataMax"}
    vertical = {
        "type": "value",
        "name": y,
        "axisLabel": {**text, ":formatter": SHORT},
        "nameTextStyle": {**text, "align": "left"},
        "splitLine": {"lineStyle": {"color": GRID}},
    }
    shown: dict[str, Any] = {
        "color": list(COLORS),
        "animation": False,
        "aria": {"enabled": True},
        "backgroundColor": "transparent",
        "tooltip": {"trigger": "axis", "confine": True},
        "legend": {
            "type": "scroll",
            "top": 0,
            "left": 0,
            "icon": "roundRect",
            "itemWidth": 14,
            "itemHeight": 4,
            "textStyle": text,
            "pageTextStyle": text,
            "pageIconColor": GREY,
        },
        "grid": {"left": 8, "right": 14, "top": 34, "bottom": 22, "containLabel": True},
        "xAxis": horizontal,
        "yAxis": {**vertical, "scale": True},
        "series": [],
    }
    return {**shown, **more}
