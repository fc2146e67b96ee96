"""The page of a run's groups: found by filters, words and sorting, all of which stand in its
address; each rollout leads to its conversation.
"""

import asyncio
from collections.abc import Mapping
from html import escape
from urllib.parse import urlencode

from nicegui import ui

from midflight.archive.groups import (
    GroupFilter,
    GroupOrder,
    GroupPage,
    GroupSeen,
    RolloutBrief,
    page_of,
    versions_of,
)
from midflight.archive.search import WordIndex
from midflight.errors import MidflightError
from midflight.observe.failures import shortened
from midflight.observe.readable import number
from midflight.trajectories.database import State
from midflight.types import Kind, Reason, RolloutKey
from midflight.view.visit import Visit

ON_A_PAGE = 25
REFRESH_SECONDS = 5.0
GROW_SECONDS = 0.25
"""Of the words that are indexed before a page is shown, and again and again while it is."""
MAX_LETTERS = 140
"""Of a question."""

STYLE = """
.filters { display: flex; flex-wrap: wrap; gap: 8px 12px; align-items: end; }
.filters label { display: flex; flex-direction: column; font-size: .8rem; }
.filters input, .filters select, .filters button { border: 1px solid currentColor; border-radius: 4px; padding: 4px 8px; min-height: 32px;
  background: transparent; color: inherit; font: inherit; max-width: 92vw; }
.filters select option { color: #000; background: #fff; }
.filters button { cursor: pointer; font-weight: 600; }
.filters :focus-visible { outline: 3px solid #E69F00; }
table.groups { min-width: 60rem; }
.rollouts { display: flex; flex-wrap: wrap; gap: 2px 8px; max-width: 26rem; }
.rollouts a.failed { font-weight: 600; }
.rollouts a.found { outline: 2px solid #E69F00; }
"""

ORDERS = {
    GroupOrder.NEWEST: "newest first",
    GroupOrder.OLDEST: "oldest first",
    GroupOrder.WORST: "lowest reward first",
    GroupOrder.BEST: "highest reward first",
    GroupOrder.SPREAD: "largest spread first",
    GroupOrder.LONGEST: "longest first",
    GroupOrder.FAILED: "most failures first",
}
FATES = {state.value: state.value.replace("_", " ") for state in State} | {
    reason.value: f"dropped: {reason}" for reason in Reason
}


async def draw(visit: Visit) -> None:
    wanted, order, first = asked(visit)
    words = WordIndex(visit.run.folder, wanted.kind) if wanted.words else None

    async def look() -> tuple[GroupPage, str, float]:
        """The page, what is said above it, and the seconds after which it may be another one."""
        indexed = await asyncio.to_thread(words.grow, GROW_SECONDS) if words else None
        page = await asyncio.to_thread(
            page_of,
            visit.run.folder,
            wanted,
            order=order,
            first=first,
            number=ON_A_PAGE,
            words=words,
        )
        if indexed is None or indexed.complete:
            return page, _counted(page, first), REFRESH_SECONDS
        return (
            page,
            (
                f"{_counted(page, first)}; looked through {indexed.done:,} of {indexed.total:,} "
                "rollouts so far"
            ),
            GROW_SECONDS,
        )

    page, counted, wait = await look()
    ui.add_head_html(f"<style>{STYLE}</style>")
    ui.html(_form(visit, page), sanitize=False).classes("w-full")
    note = ui.label(counted).classes("note").props("data-test=counted aria-live=polite")
    found = ui.html(_table(visit, page), sanitize=False).classes("w-full")
    ui.html(_pager(visit, page, first), sanitize=False)

    async def refresh() -> None:
        try:
            now, note.text, timer.interval = await look()
        except MidflightError as error:
            note.text = str(error)
            timer.deactivate()
            return
        if found.content != (table := _table(visit, now)):
            found.content = table

    timer = ui.timer(wait, refresh, immediate=False)


def asked(visit: Visit) -> tuple[GroupFilter, GroupOrder, int]:
    """What the address asks for; `MidflightError` where it asks for what there is not."""
    query = visit.query
    kind = kind_of(visit)
    step = query.get("step", "")
    page = query.get("page", "1")
    order = query.get("sort") or GroupOrder.NEWEST.value
    if (step and not step.isdecimal()) or not page.isdecimal() or page == "0":
        raise MidflightError(
            f"step is {step!r} and page {page!r} in the address; both are whole numbers, pages "
            "from 1."
        )
    if order not in {each.value for each in GroupOrder}:
        raise MidflightError(
            f"groups are not sorted by {order!r}; they are by {', '.join(GroupOrder)}."
        )
    return (
        GroupFilter(
            kind=kind,
            versions=versions_of(visit.run.folder, int(step), int(step), kind) if step else None,
            source=query.get("source", ""),
            task=query.get("task", ""),
            fate=query.get("fate", ""),
            failure=query.get("failure", ""),
            words=query.get("q", "").strip(),
        ),
        GroupOrder(order),
        (int(page) - 1) * ON_A_PAGE,
    )


def kind_of(visit: Visit) -> Kind:
    """Whose rollouts the address asks for; `MidflightError` where there are none of that kind."""
    asked = visit.query.get("kind") or Kind.TRAINING.value
    if asked not in (Kind.TRAINING, Kind.EVALUATION):
        raise MidflightError(
            f"rollouts of kind {asked!r} are not shown; there are those of {Kind.TRAINING} and of "
            f"{Kind.EVALUATION}."
        )
    return Kind(asked)


def conversation_link(visit: Visit, key: RolloutKey) -> str:
    of = key.group
    kind = None if key.kind is Kind.TRAINING else key.kind.value
    return visit.link(
        "conversation",
        epoch=of.epoch,
        position=of.index,
        attempt=of.attempt,
        sample=key.sample,
        kind=kind,
    )


# --- Filters --------------------------------------------------------------------------------------


def _form(visit: Visit, page: GroupPage) -> str:
    """A plain form: what is chosen becomes the address."""
    query = visit.query
    failures = {name: f"{name} ({count})" for name, count in page.failures.items()}
    fates = {
        fate: f"{name} ({page.fates[fate]})" for fate, name in FATES.items() if fate in page.fates
    }
    kinds = {Kind.TRAINING.value: "of training", Kind.EVALUATION.value: "of evaluations (held out)"}
    fields = [
        _choice("Rollouts", "kind", kinds, query, None),
        _field(
            "Words",
            (
                '<input type="search" name="q" data-test="words" '
                f'value="{escape(query.get("q", ""))}">'
            ),
        ),
        _choice("Source", "source", {source: source for source in page.sources}, query, "all"),
        _choice("Fate", "fate", fates, query, "all"),
        _choice("Failed with", "failure", failures, query, "any or none"),
        _field(
            "Step",
            (
                '<input name="step" inputmode="numeric" size="6" '
                f'value="{escape(query.get("step", ""))}">'
            ),
        ),
        _field("Task", f'<input name="task" size="10" value="{escape(query.get("task", ""))}">'),
        _choice(
            "Sorted", "sort", {order.value: text for order, text in ORDERS.items()}, query, None
        ),
        '<button type="submit" data-test="filter">Show</button>',
        f'<a href="{escape(visit.link("groups"))}">all groups</a>',
    ]
    return (
        '<form class="filters" method="get" role="search" aria-label="Filter '
        f'groups">{"".join(fields)}</form>'
    )


def _field(title: str, control: str) -> str:
    return f"<label>{title}{control}</label>"


def _choice(
    title: str, name: str, values: Mapping[str, str], query: Mapping[str, str], empty: str | None
) -> str:
    shown = {**({} if empty is None else {"": empty}), **values}
    if (chosen := query.get(name, "")) not in shown and chosen:
        shown = {**shown, chosen: chosen}
    options = (
        (
            "<option "
            f'value="{escape(value)}"{" selected" if value == chosen else ""}>{escape(text)}</option>'
        )
        for value, text in shown.items()
    )
    return _field(title, f'<select name="{name}" data-test="{name}">{"".join(options)}</select>')


def _counted(page: GroupPage, first: int) -> str:
    if not page.total:
        return "no group is like that"
    return f"groups {first + 1:,} to {first + len(page.groups):,} of {page.total:,}"


def _pager(visit: Visit, page: GroupPage, first: int) -> str:
    here = first // ON_A_PAGE + 1
    last = max(1, -(-page.total // ON_A_PAGE))
    places = {"first": 1, "previous": here - 1, "next": here + 1, "last": last}
    links = [
        (
            f'<a href="?{escape(urlencode({**visit.query, "page": place}))}" data-test="{name} '
            f'page">{name}</a>'
        )
        for name, place in places.items()
        if 1 <= place <= last and place != here
    ]
    return (
        f'<nav class="rollouts" aria-label="Pages of groups">page {here:,} of {last:,} '
        f"{' '.join(links)}</nav>"
    )


# --- The table ------------------------------------------------------------------------------------

_COLUMNS = ("task", "source", "rewards of its rollouts", "mean", "spread", "made of")


def _table(visit: Visit, page: GroupPage) -> str:
    """One element, however many rollouts there are: a page is drawn in milliseconds."""
    steps = {line.version: line.step for line in visit.run.journal().past.steps}
    by = "version" if kind_of(visit) is Kind.EVALUATION else "epoch"
    head = "".join(
        f'<th scope="col">{column}</th>' for column in (*_COLUMNS, f"passed, by {by}", "fate")
    )
    rows = "".join(_row(visit, group, steps) for group in page.groups)
    return (
        '<div class="scroll"><table class="plain groups" aria-label="groups" '
        f'data-test="groups"><tr>{head}</tr>{rows}</table></div>'
    )


def _row(visit: Visit, group: GroupSeen, steps: Mapping[int, int]) -> str:
    key = group.key
    task = group.task
    question = _question(group)
    cells = [
        (
            "<a "
            f'href="{escape(visit.link("groups", task=task.id, source=task.source, kind=visit.query.get("kind")))}">{escape(task.id)}</a> {escape(question)}'
        ),
        escape(task.source),
        (
            "<span "
            f'class="rollouts">{"".join(_rollout(visit, rollout) for rollout in group.rollouts) or "none has ended"}</span>{_errors(group)}'
        ),
        number(group.mean),
        number(group.spread),
        escape(", ".join(f"{name} {number(value)}" for name, value in components(group).items())),
        escape(
            ", ".join(f"{score.epoch}: {score.passed}/{score.scored}" for score in group.epochs)
        ),
        _fate(visit, group, steps),
    ]
    name = f"{key.epoch}-{key.index}-{key.attempt}"
    return f'<tr data-test="group {name}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _question(group: GroupSeen) -> str:
    """What the task asks, as far as it says that in words."""
    text = next(
        (
            value
            for name in ("question", "prompt", "word")
            if isinstance(value := group.task.data.get(name), str)
        ),
        "",
    )
    messages = group.task.data.get("messages")
    if not text and isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        text = str(messages[-1].get("content", ""))
    return text if len(text) <= MAX_LETTERS else text[:MAX_LETTERS] + "…"


def _rollout(visit: Visit, rollout: RolloutBrief) -> str:
    link = conversation_link(visit, rollout.key)
    text, kind = (
        (number(rollout.reward), "")
        if rollout.failure is None
        else (f"✕ {rollout.failure}", "failed")
    )
    title = escape(
        rollout.error
        or (
            f"{rollout.num_trainable} tokens, {rollout.seconds:.1f} "
            f"s{', truncated' if rollout.truncated else ''}"
        )
    )
    classes = f"{kind} found" if rollout.found else kind
    return (
        f'<a class="{classes}" href="{escape(link)}" title="{title}" data-test="rollout '
        f'{rollout.key}">{escape(text)}</a>'
    )


def components(group: GroupSeen) -> dict[str, float]:
    """Means over its rollouts, by name."""
    found: dict[str, list[float]] = {}
    for rollout in group.rollouts:
        for name, value in rollout.components.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def _fate(visit: Visit, group: GroupSeen, steps: Mapping[int, int]) -> str:
    if group.version is None or (step := steps.get(group.version)) is None:
        return escape(group.fate)
    return (
        f'<a href="{escape(visit.link("groups", step=step))}">step {step}</a>: {escape(group.fate)}'
    )


def _errors(group: GroupSeen) -> str:
    """Why rollouts of it failed, each reason once."""
    errors = dict.fromkeys(
        rollout.error or "no reward, and no error"
        for rollout in group.rollouts
        if rollout.reward is None
    )
    return "".join(
        f'<div class="note" data-test="why">{escape(shortened(error))}</div>' for error in errors
    )
