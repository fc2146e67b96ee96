"""The elements of pages: headings, figures, tables and charts, in the style of `style.css`.

A chart is a picture, which neither a keyboard nor a screen reader reads. Everything important in it
is therefore beside it as text or links.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from nicegui import ui

from midflight.observe.readable import percent
from midflight.types import Version
from midflight.view.charting import version_color

STYLE = (Path(__file__).parent / "style.css").read_text()
LONG = 24
"""A cell with more letters has a line of its own on a phone, and is no number, even if it begins
with one.
"""

LONG_FIGURE = 50
"""The letters from which on a figure has a row of its own."""


@dataclass(frozen=True, slots=True)
class Markup:
    """A cell that is HTML already, of a page's own making."""

    html: str


Cell: TypeAlias = "str | tuple[str, str] | Markup"
"""A text, or a text and the address to which it leads, or HTML."""


def section(title: str, note: str = "") -> None:
    with ui.element("h2"):
        ui.label(title)
    if note:
        ui.label(note).classes("note")


def panel() -> ui.element:
    """A box for what belongs together."""
    return ui.element("div").classes("panel")


def two_columns() -> ui.element:
    """What stands in it is side by side where there is room."""
    return ui.element("div").classes("two")


def facts(pairs: Sequence[tuple[str, str]]) -> None:
    """Numbers, each with its name."""
    tiles = "".join(_tile(name, text) for name, text in pairs)
    ui.html(f'<div class="facts">{tiles}</div>', sanitize=False).classes("w-full")


def _tile(name: str, text: str) -> str:
    name = escape(name)
    kind = ' class="long"' if len(text) > LONG_FIGURE else ""
    return f'<div{kind}><span class="note">{name}</span>{told(name, text)}</div>'


def told(name: str, text: str) -> str:
    """A figure as HTML. Tests find it by its name."""
    return f'<b data-test="{escape(name)}">{escape(text)}</b>'


def tag(text: str, kind: str = "", *, title: str = "") -> str:
    """A short word on a pill, as HTML. `kind` is good, bad, warn, live or nothing."""
    hint = f' title="{escape(title)}"' if title else ""
    return f'<span class="tag {kind}"{hint}>{escape(text)}</span>'


def meter(share: float | None) -> str:
    """A small bar, as HTML, that is filled to a share."""
    width = 0.0 if share is None else min(max(share, 0.0), 1.0)
    return f'<span class="meter"><i style="width: {width:.1%}"></i></span>'


def share(of: float | None) -> Markup:
    """A share in numbers and as a small bar, one below the other in a column."""
    return Markup(f'<span class="share">{percent(of)}</span>{meter(of)}')


def version(number: Version, text: str = "") -> str:
    """A version with its colour, as HTML: the colour is the same on every page."""
    colour = version_color(number)
    shown = escape(text or f"version {number}")
    return f'<span class="v"><i style="background: {colour}" data-version="{number}"></i>{shown}</span>'


def table(
    columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, name: str = "", pairs: bool = False
) -> None:
    """A table, which tests and screen readers find by its `name`. It is one element however many
    cells it has, because each element costs the viewer and the browser time. On a phone each row is
    a card, unless the rows are pairs.
    """
    right = [_is_numeric([row[at] for row in rows if at < len(row)]) for at in range(len(columns))]
    heads = zip(columns, right, strict=True)
    head = "".join(f'<th scope="col"{_kind(n=n)}>{escape(column)}</th>' for column, n in heads)
    body = "".join(_table_row(row, columns, right) for row in rows)
    kind = "plain pairs" if pairs else "plain"
    begin = f'<table class="{kind}" aria-label="{escape(name)}" data-test="{escape(name)}">'
    made = f"{begin}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    ui.html(f'<div class="scroll">{made}</div>', sanitize=False).classes("w-full")


def _is_numeric(cells: Sequence[Cell]) -> bool:
    """True if each cell of the column is a number, with a unit or without."""
    texts = [cell for cell in cells if cell != ""]
    return bool(texts) and all(
        isinstance(text, str) and len(text) <= LONG and text[0] in "0123456789–" for text in texts
    )


def _kind(*, n: bool = False, long: bool = False) -> str:
    names = [name for name, holds in (("n", n), ("long", long)) if holds]
    return f' class="{" ".join(names)}"' if names else ""


def _table_row(row: Sequence[Cell], columns: Sequence[str], right: Sequence[bool]) -> str:
    cells: list[str] = []
    for cell, column, numeric in zip(row, columns, right, strict=False):
        long = isinstance(cell, str) and len(cell) > LONG
        kind = _kind(n=numeric, long=long)
        cells.append(f'<td data-label="{escape(column)}"{kind}>{_shown(cell)}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _shown(cell: Cell) -> str:
    match cell:
        case Markup(html=html):
            return html
        case str():
            return escape(cell)
        case (text, to):
            return f'<a href="{escape(to)}">{escape(text)}</a>'


def charts(*, many: bool = False) -> ui.element:
    """A grid of charts, as many beside each other as there is room for. Many charts are swiped
    through on a phone.
    """
    return ui.element("div").classes("charts many" if many else "charts")


def figure(
    title: str,
    options: dict[str, Any],
    *,
    note: str = "",
    height: int = 210,
    first: bool = False,
) -> tuple[ui.echart, ui.label]:
    """Draws a chart with its heading. `note` describes it in words, and `first` gives it the width
    of two. Returns the chart and the label of the note. It is drawn as SVG, whose texts take their
    colour from the page, be it light or dark.
    """
    with ui.element("div").classes("first" if first else ""):
        with ui.element("h3"):
            ui.label(title)
        drawn = ui.echart(options, renderer="svg").style(f"height: {height}px; width: 100%")
        drawn.props(f'role="img" aria-label="{title}" data-test="chart {title}"')
        said = ui.label(note).classes("note")
    return drawn, said


# --- Before a page's programs are there -----------------------------------------------------------

PLAIN = frozenset({"div", "details", "h1", "h2", "h3", "li", "nav", "span", "summary", "ul"})


def at_first(page: ui.element, *, look: str) -> str:
    """The content of the page as HTML that needs no program. A browser shows it while it still
    loads the programs of NiceGUI and the charts. They mount the page on the first element of this
    id and replace its content. `look` is dark, light or auto.
    """
    inside = "".join(map(_still, page.default_slot.children))
    return f'<div id="app"><div class="nicegui-content shown {look}">{inside}</div></div>'


def _still(element: ui.element) -> str:
    """Returns the element and its content as HTML. A chart is an empty space of its size, and so is
    an input field until it answers.
    """
    told = {name: value for name, value in element.props.items() if isinstance(value, str)}
    told["class"] = " ".join(element.classes)
    told["style"] = "; ".join(f"{name}: {value}" for name, value in element.style.items())
    tag = element.tag if element.tag in PLAIN else "div"
    inside = ""
    match element:
        case ui.html():
            if "<form" in element.content or "<textarea" in element.content:
                told["class"] += " unready"
            inside = element.content
        case ui.link():
            tag = "a"
            inside = escape(element.text)
        case ui.label():
            inside = escape(element.text)
        case _ if element.tag in PLAIN:
            inside = "".join(map(_still, element.default_slot.children))
        case _ if element.style:
            told = {"style": told["style"]}
        case _:
            return ""  # it cannot be seen, for instance a timer
    said = "".join(f' {name}="{escape(value)}"' for name, value in told.items() if value)
    return f"<{tag}{said}>{inside}</{tag}>"
