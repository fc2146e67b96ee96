"""The elements of pages: their style, headings, tables and charts.

A chart is a canvas, which neither a keyboard nor a screen reader reads. Everything important in it
is therefore beside it as text or links.
"""

from collections.abc import Sequence
from html import escape
from typing import Any, TypeAlias

from nicegui import ui

STYLE = """
:root { --line: rgba(128,128,128,.3); --note: #616161; }
.body--dark { --note: #b0b0b0; color-scheme: dark; }
.nicegui-content { padding: 0; }
body { font-family: system-ui, "Helvetica Neue", Helvetica, Arial, sans-serif; }
.w-full { width: 100%; }
.gap-1 { gap: 4px; }
summary { display: list-item; cursor: pointer; }
.shown { min-height: 100vh; }
@media (prefers-color-scheme: dark) {
  #app > .auto { background: var(--q-dark-page); color: #fff; --note: #b0b0b0; }
  #app > .auto a { color: #7cc4f5; }
}
#app > .dark { background: var(--q-dark-page); color: #fff; --note: #b0b0b0; }
#app > .dark a { color: #7cc4f5; }
.unready { visibility: hidden; }
.page { width: 100%; max-width: 1500px; margin: 0 auto; padding: 12px 16px 48px; gap: 4px; }
.page h1, .page h2, .page h3 { line-height: 1.3; letter-spacing: normal; }
.page h1 { font-size: 1.35rem; font-weight: 600; margin: 4px 0; overflow-wrap: anywhere; }
.page h2 { font-size: 1.05rem; font-weight: 600; margin: 20px 0 4px; }
.page a, .bar a { color: #0b62a0; text-decoration: underline; text-underline-offset: 2px; }
.body--dark .page a, .body--dark .bar a { color: #7cc4f5; }
a:focus-visible, button:focus-visible, input:focus-visible { outline: 3px solid #E69F00; outline-offset: 2px; }
.bar { display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: center; padding: 8px 16px; border-bottom: 1px solid var(--line); width: 100%; }
.bar .here { font-weight: 700; text-decoration: none; }
.note { color: var(--note); font-size: .875rem; white-space: pre-line; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 12px 20px; width: 100%; }
.charts > div { min-width: 0; }
.charts h3 { font-size: .95rem; font-weight: 600; margin: 0; }
.scroll { overflow-x: auto; width: 100%; }
table.plain { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
table.plain th, table.plain td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; max-width: 44rem; overflow-wrap: anywhere; }
table.plain td { white-space: pre-line; }
table.plain td:first-child { white-space: nowrap; }
.tiles { display: flex; flex-wrap: wrap; gap: 6px 28px; }
.tiles b { display: block; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.trouble { border-left: 4px solid #D55E00; padding: 4px 0 4px 12px; margin: 4px 0; width: 100%; }
"""

Cell: TypeAlias = "str | tuple[str, str]"
"""A text, or a text and the address to which it leads."""


def section(title: str, note: str = "") -> None:
    with ui.element("h2"):
        ui.label(title)
    if note:
        ui.label(note).classes("note")


def facts(pairs: Sequence[tuple[str, str]]) -> None:
    """Numbers in a row, each under its name."""
    tiles = "".join(_tile(name, text) for name, text in pairs)
    ui.html(f'<div class="tiles">{tiles}</div>', sanitize=False)


def _tile(name: str, text: str) -> str:
    name = escape(name)
    return f'<div><span class="note">{name}</span><b data-test="{name}">{escape(text)}</b></div>'


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, name: str = "") -> None:
    """A table, which tests and screen readers find by its `name`. It is one element however many
    cells it has, because each element costs the viewer and the browser time.
    """
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(_table_row(row) for row in rows)
    begin = f'<table class="plain" aria-label="{escape(name)}" data-test="{escape(name)}">'
    made = f"{begin}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    ui.html(f'<div class="scroll">{made}</div>', sanitize=False).classes("w-full")


def _table_row(row: Sequence[Cell]) -> str:
    cells = "".join(f"<td>{_shown(cell)}</td>" for cell in row)
    return f"<tr>{cells}</tr>"


def _shown(cell: Cell) -> str:
    if isinstance(cell, str):
        return escape(cell)
    text, to = cell
    return f'<a href="{escape(to)}">{escape(text)}</a>'


def charts() -> ui.element:
    """A grid of charts, as many beside each other as there is room for."""
    return ui.element("div").classes("charts")


def figure(
    title: str,
    options: dict[str, Any],
    *,
    note: str = "",
    height: int = 230,
) -> tuple[ui.echart, ui.label]:
    """Draws a chart with its heading. `note` describes it in words. Returns the chart and the label
    of the note.
    """
    with ui.element("div"):
        with ui.element("h3"):
            ui.label(title)
        drawn = ui.echart(options).style(f"height: {height}px; width: 100%")
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
