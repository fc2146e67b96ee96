"""The page of a run's ledger: the fate of every token, from the model to the trainer, and whether
the sums agree.
"""

import asyncio
import time

from nicegui import ui

from midflight.archive.ledger import Ledger, ledger_of, place_name
from midflight.errors import MidflightError
from midflight.view.charting import COLORS, GREY
from midflight.view.visit import PageRequest
from midflight.view.widgets import (
    Cell,
    charts,
    facts,
    figure,
    panel,
    section,
    share,
    table,
    two_columns,
)

REFRESH_SECONDS = 5.0
LATEST_SECONDS = 60.0
SHARE = 0.05
"""The share of the time that may be spent on refreshes: the sums of a large run take most of a
second.
"""


async def draw(visit: PageRequest) -> None:
    shown = await asyncio.to_thread(ledger_of, visit.run.folder)
    place = ui.element("div").classes("sheet")
    with place:
        _show(visit, shown)

    async def refresh() -> None:
        nonlocal shown
        begun = time.perf_counter()
        try:
            found = await asyncio.to_thread(ledger_of, visit.run.folder)
            took = time.perf_counter() - begun
            timer.interval = min(max(REFRESH_SECONDS, took / SHARE), LATEST_SECONDS)
        except MidflightError as error:
            timer.deactivate()
            with place:
                ui.label(str(error)).props("role=alert")
            return
        if found != shown:
            shown = found
            place.clear()
            with place:
                _show(visit, shown)

    timer = ui.timer(REFRESH_SECONDS, refresh, immediate=False)


def _show(visit: PageRequest, ledger: Ledger) -> None:
    accounts = ledger.accounts
    with panel().classes("w-full"):
        facts(
            [
                ("tokens received", f"{accounts.received_tokens:,}"),
                ("trained", _share(accounts.trained_tokens, accounts.received_tokens)),
                ("waiting", f"{accounts.waiting_tokens:,}"),
                ("masked", f"{sum(accounts.masked_tokens.values()):,}"),
                ("dropped", f"{sum(accounts.dropped_tokens.values()):,}"),
                ("in flight", f"{ledger.in_flight:,}"),
            ]
        )
        kind = "trouble" if ledger.mistakes else "calm"
        balance = ui.label(f"The ledger: {ledger.balance}.").classes(kind)
        balance.props("data-test=balance")
    with two_columns():
        if accounts.received_tokens:
            with charts():
                note = "From each source to what became of its tokens; the table has the numbers."
                figure("Where the tokens went", _flow(ledger), height=320, note=note)
        with panel():
            section("Groups")
            table(("fate", "groups", "share"), _groups(visit, ledger), name="groups by fate")
    with panel().classes("w-full"):
        section(
            "Tokens",
            "Of rollouts that have ended. Those in flight are of completed turns of rollouts that "
            "go on.",
        )
        sources = [line.source for line in ledger.sources]
        rows = list(ledger.token_rows())
        table(["place", *sources, "all", "what they are"], rows, name="tokens")


def _groups(visit: PageRequest, ledger: Ledger) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for name, count in ledger.groups().items():
        fate = None if name == "submitted" else name.removeprefix("dropped: ")
        part = count / ledger.accounts.submitted if ledger.accounts.submitted else None
        link = (name, visit.link("groups", fate=fate))
        rows.append([link, f"{count:,}", share(part)])
    return rows


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else f"{part:,}"


def _flow(ledger: Ledger) -> dict[str, object]:
    """A Sankey diagram: sources to the left, places to the right."""
    # The blank tells a source from a place with the same name.
    names = [f"{line.source} " for line in ledger.sources]
    names += [place_name(place) for place in ledger.places]
    links: list[dict[str, object]] = []
    for line in ledger.sources:
        for place, count in line.tokens.items():
            if count:
                source = f"{line.source} "
                links.append({"source": source, "target": place_name(place), "value": count})
    data = [
        {"name": name, "itemStyle": {"color": COLORS[at % len(COLORS)]}}
        for at, name in enumerate(names)
    ]
    series = {
        "type": "sankey",
        "data": data,
        "links": links,
        "label": {"color": GREY},
        "lineStyle": {"color": "gradient", "opacity": 0.4},
        "left": 8,
        "right": 130,
        "top": 8,
        "bottom": 8,
    }
    return {
        "series": [series],
        "tooltip": {"trigger": "item", "confine": True},
        "animation": False,
        "aria": {"enabled": True},
    }
