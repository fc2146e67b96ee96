"""How pages look: colours that people tell apart however they see, charts that fit a light and a
dark page, tables, headings.

A chart is a canvas, which neither a keyboard nor a screen reader reads: whatever it says that
matters stands beside it as text or links.
"""

from collections.abc import Callable, Sequence
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
"""Text, or text and where it leads."""


def section(title: str, note: str = "") -> None:
    with ui.element("h2"):
        ui.label(title)
    if note:
        ui.label(note).classes("note")


def facts(pairs: Sequence[tuple[str, str]]) -> None:
    """Numbers in a row, each under its name."""
    tiles = (
        (
            f'<div><span class="note">{escape(name)}</span><b '
            f'data-test="{escape(name)}">{escape(text)}</b></div>'
        )
        for name, text in pairs
    )
    ui.html(f'<div class="tiles">{"".join(tiles)}</div>', sanitize=False)


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, name: str = "") -> None:
    """`name` is how tests and screen readers find it. One element, however many cells it has: each
    element costs viewer and browser time.
    """
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{_shown(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    begin = f'<table class="plain" aria-label="{escape(name)}" data-test="{escape(name)}">'
    ui.html(
        (
            "<div "
            f'class="scroll">{begin}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        ),
        sanitize=False,
    ).classes("w-full")


def _shown(cell: Cell) -> str:
    if isinstance(cell, str):
        return escape(cell)
    text, to = cell
    return f'<a href="{escape(to)}">{escape(text)}</a>'


def charts() -> ui.element:
    """A grid that charts stand in: as many beside each other as there is room for."""
    return ui.element("div").classes("charts")


def figure(
    title: str,
    options: dict[str, Any],
    *,
    note: str = "",
    height: int = 230,
    on_click: Callable[[Any], None] | None = None,
) -> tuple[ui.echart, ui.label]:
    """A chart with its heading. `note` says in words what it shows, for everybody. Returns both."""
    with ui.element("div"):
        with ui.element("h3"):
            ui.label(title)
        drawn = ui.echart(options, on_point_click=on_click).style(
            f"height: {height}px; width: 100%"
        )
        drawn.props(f'role="img" aria-label="{title}" data-test="chart {title}"')
        said = ui.label(note).classes("note")
    return drawn, said


# --- Before a page's programs are there -----------------------------------------------------------

PLAIN = frozenset({"div", "details", "h1", "h2", "h3", "li", "nav", "span", "summary", "ul"})


def at_first(page: ui.element, *, look: str) -> str:
    """What is on the page as HTML that needs no program. A browser has it to show while it still
    loads NiceGUI's and the charts': they mount the page on the first element of this id, in place
    of what is in it. `look` is dark, light or auto."""
    return (
        '<div id="app"><div class="nicegui-content shown '
        f'{look}">{"".join(map(_still, page.default_slot.children))}</div></div>'
    )


def _still(element: ui.element) -> str:
    """The element and what is in it. Of a chart there is its room; what can be typed into has its
    room until it answers.
    """
    told = {name: value for name, value in element.props.items() if isinstance(value, str)}
    told |= {
        "class": " ".join(element.classes),
        "style": "; ".join(f"{name}: {value}" for name, value in element.style.items()),
    }
    tag = element.tag if element.tag in PLAIN else "div"
    inside = ""
    match element:
        case ui.html():
            told["class"] += (
                " unready" if "<form" in element.content or "<textarea" in element.content else ""
            )
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
            return ""  # nothing to be seen, as of a timer
    said = "".join(f' {name}="{escape(value)}"' for name, value in told.items() if value)
    return f"<{tag}{said}>{inside}</{tag}>"
