"""The page of a run's ledger: the fate of every token, from the model to the trainer, and whether
the sums agree.
"""

import asyncio
import time
from collections.abc import Sequence

from nicegui import ui

from midflight.archive.ledger import MEANINGS, Ledger, ledger_of
from midflight.errors import MidflightError
from midflight.types import Accounts, Fate, Reason
from midflight.view.charting import COLORS, GREY
from midflight.view.visit import PageRequest
from midflight.view.widgets import Cell, charts, facts, figure, section, table

REFRESH_SECONDS = 5.0
LATEST_SECONDS = 60.0
SHARE = 0.05
"""The share of the time that may be spent on refreshes: the sums of a large run take most of a
second.
"""


async def draw(visit: PageRequest) -> None:
    shown = await asyncio.to_thread(ledger_of, visit.run.folder)
    place = ui.column().classes("w-full gap-1")
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
    if ledger.balanced:
        balance = "Balanced: each token is in one place."
    else:
        balance = f"It does not add up: {'; '.join(ledger.mistakes)}."
    ui.label(balance).classes("note" if ledger.balanced else "trouble").props("data-test=balance")
    if accounts.received_tokens:
        with charts():
            note = "From each source to what became of its tokens; the table has the numbers."
            figure("Where the tokens went", _flow(ledger), height=320, note=note)
    section(
        "Tokens",
        "Of rollouts that have ended. Those in flight are of completed turns of rollouts that "
        "go on.",
    )
    sources = [line.source for line in ledger.sources]
    table(["place", *sources, "all", "what they are"], _rows(ledger), name="tokens")
    section("Groups")
    table(("fate", "groups"), _groups(visit, accounts), name="groups by fate")


def _groups(visit: PageRequest, accounts: Accounts) -> list[list[Cell]]:
    groups = {
        "trained": accounts.trained,
        "waiting": accounts.waiting,
        "leased": accounts.leased,
        "running": accounts.running,
    }
    groups.update(accounts.dropped)
    rows: list[list[Cell]] = []
    for fate, count in groups.items():
        name = f"dropped: {fate}" if fate in accounts.dropped else fate
        rows.append([(name, visit.link("groups", fate=fate)), f"{count:,}"])
    rows.append(["submitted", f"{accounts.submitted:,}"])
    return rows


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else f"{part:,}"


def _places(ledger: Ledger) -> list[tuple[Fate, Reason | None]]:
    order = list(Fate)
    found = set[tuple[Fate, Reason | None]]()
    for line in ledger.sources:
        found.update(line.tokens)
    return sorted(found, key=lambda place: (order.index(place[0]), place[1] or ""))


def _name(place: tuple[Fate, Reason | None]) -> str:
    fate, reason = place
    return fate.value if reason is None else f"{fate}: {reason}"


def _rows(ledger: Ledger) -> list[list[str]]:
    rows: list[list[str]] = []
    for place in _places(ledger):
        _, reason = place
        counts = [line.tokens.get(place, 0) for line in ledger.sources]
        rows.append(_row(_name(place), counts, MEANINGS[reason] if reason else ""))
    received = [line.received for line in ledger.sources]
    rows.append(_row("received", received, "all of these together"))
    return rows


def _row(name: str, counts: Sequence[int], meaning: str) -> list[str]:
    """The counts of each source and their sum, between a name and a meaning."""
    row = [name]
    row += [f"{count:,}" for count in counts]
    row += [f"{sum(counts):,}", meaning]
    return row


def _flow(ledger: Ledger) -> dict[str, object]:
    """A Sankey diagram: sources to the left, places to the right."""
    # The blank tells a source from a place with the same name.
    names = [f"{line.source} " for line in ledger.sources]
    names += [_name(place) for place in _places(ledger)]
    links: list[dict[str, object]] = []
    for line in ledger.sources:
        for place, count in line.tokens.items():
            if count:
                source = f"{line.source} "
                links.append({"source": source, "target": _name(place), "value": count})
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
