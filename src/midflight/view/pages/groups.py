"""The page of a run's groups. Filters, words and sorting are in its address. Each rollout leads to
its conversation.
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
    GroupView,
    RolloutBrief,
    page_of,
    versions_of,
)
from midflight.archive.search import WordIndex
from midflight.errors import MidflightError
from midflight.observe.failures import shortened
from midflight.observe.learning import means
from midflight.observe.readable import number
from midflight.trajectories.database import State
from midflight.types import Json, Kind, Reason, RolloutKey
from midflight.view.visit import PageRequest

ON_A_PAGE = 25
REFRESH_SECONDS = 5.0
GROW_SECONDS = 0.25
"""The seconds for which words are indexed before a page is shown, and at each refresh after
that.
"""
MAX_LETTERS = 140
"""The number of letters of a question that are shown."""

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


async def draw(visit: PageRequest) -> None:
    wanted, order, first = asked(visit)
    words = WordIndex(visit.run.folder, wanted.kind) if wanted.words else None

    async def look() -> tuple[GroupPage, str, float]:
        """The page, the text above it, and the seconds after which it may have changed."""
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
        counted = _counted(page, first)
        if indexed is None or indexed.complete:
            return page, counted, REFRESH_SECONDS
        so_far = f"looked through {indexed.done:,} of {indexed.total:,} rollouts so far"
        return page, f"{counted}; {so_far}", GROW_SECONDS

    page, counted, wait = await look()
    ui.add_head_html(f"<style>{STYLE}</style>")
    ui.html(_form(visit, page), sanitize=False).classes("w-full")
    note = ui.label(counted).classes("note").props("data-test=counted aria-live=polite")
    found = ui.html(_table(visit, page), sanitize=False).classes("w-full")
    ui.html(_pager(visit, page, first), sanitize=False)

    async def refresh() -> None:
        try:
            now, counted, wait = await look()
        except MidflightError as error:
            note.text = str(error)
            timer.deactivate()
            return
        note.text = counted
        timer.interval = wait
        table = _table(visit, now)
        if found.content != table:
            found.content = table

    timer = ui.timer(wait, refresh, immediate=False)


def asked(visit: PageRequest) -> tuple[GroupFilter, GroupOrder, int]:
    """The groups that the address asks for. Raises `MidflightError` if it cannot be understood."""
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
    versions = None
    if step:
        versions = versions_of(visit.run.folder, int(step), int(step), kind)
    wanted = GroupFilter(
        kind=kind,
        versions=versions,
        source=query.get("source", ""),
        task=query.get("task", ""),
        fate=query.get("fate", ""),
        failure=query.get("failure", ""),
        words=query.get("q", "").strip(),
    )
    return wanted, GroupOrder(order), (int(page) - 1) * ON_A_PAGE


def kind_of(visit: PageRequest) -> Kind:
    """The kind of rollouts that the address asks for. Raises `MidflightError` if there is no such
    kind.
    """
    asked = visit.query.get("kind") or Kind.TRAINING.value
    if asked not in (Kind.TRAINING, Kind.EVALUATION):
        raise MidflightError(
            f"rollouts of kind {asked!r} are not shown; there are those of {Kind.TRAINING} and of "
            f"{Kind.EVALUATION}."
        )
    return Kind(asked)


def conversation_link(visit: PageRequest, key: RolloutKey) -> str:
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


def _form(visit: PageRequest, page: GroupPage) -> str:
    """A plain form, whose choices become the address."""
    query = visit.query
    sources = {source: source for source in page.sources}
    failures = {name: f"{name} ({count})" for name, count in page.failures.items()}
    fates = {
        fate: f"{name} ({page.fates[fate]})" for fate, name in FATES.items() if fate in page.fates
    }
    kinds = {Kind.TRAINING.value: "of training", Kind.EVALUATION.value: "of evaluations (held out)"}
    orders = {order.value: text for order, text in ORDERS.items()}
    words = escape(query.get("q", ""))
    step = escape(query.get("step", ""))
    task = escape(query.get("task", ""))
    fields = [
        _choice("Rollouts", "kind", kinds, query, None),
        _field("Words", f'<input type="search" name="q" data-test="words" value="{words}">'),
        _choice("Source", "source", sources, query, "all"),
        _choice("Fate", "fate", fates, query, "all"),
        _choice("Failed with", "failure", failures, query, "any or none"),
        _field("Step", f'<input name="step" inputmode="numeric" size="6" value="{step}">'),
        _field("Task", f'<input name="task" size="10" value="{task}">'),
        _choice("Sorted", "sort", orders, query, None),
        '<button type="submit" data-test="filter">Show</button>',
        f'<a href="{escape(visit.link("groups"))}">all groups</a>',
    ]
    begin = '<form class="filters" method="get" role="search" aria-label="Filter groups">'
    return f"{begin}{''.join(fields)}</form>"


def _field(title: str, control: str) -> str:
    return f"<label>{title}{control}</label>"


def _choice(
    title: str, name: str, values: Mapping[str, str], query: Mapping[str, str], empty: str | None
) -> str:
    shown: dict[str, str] = {}
    if empty is not None:
        shown[""] = empty
    shown.update(values)
    chosen = query.get(name, "")
    if chosen:
        shown.setdefault(chosen, chosen)
    options = "".join(_option(value, text, value == chosen) for value, text in shown.items())
    return _field(title, f'<select name="{name}" data-test="{name}">{options}</select>')


def _option(value: str, text: str, is_chosen: bool) -> str:
    selected = " selected" if is_chosen else ""
    return f'<option value="{escape(value)}"{selected}>{escape(text)}</option>'


def _counted(page: GroupPage, first: int) -> str:
    if not page.total:
        return "no group is like that"
    return f"groups {first + 1:,} to {first + len(page.groups):,} of {page.total:,}"


def _pager(visit: PageRequest, page: GroupPage, first: int) -> str:
    here = first // ON_A_PAGE + 1
    last = max(1, -(-page.total // ON_A_PAGE))
    places = {"first": 1, "previous": here - 1, "next": here + 1, "last": last}
    links: list[str] = []
    for name, place in places.items():
        if 1 <= place <= last and place != here:
            address = escape(urlencode({**visit.query, "page": place}))
            links.append(f'<a href="?{address}" data-test="{name} page">{name}</a>')
    begin = '<nav class="rollouts" aria-label="Pages of groups">'
    return f"{begin}page {here:,} of {last:,} {' '.join(links)}</nav>"


# --- The table ------------------------------------------------------------------------------------

_COLUMNS = ("task", "source", "rewards of its rollouts", "mean", "spread", "made of")


def _table(visit: PageRequest, page: GroupPage) -> str:
    """The table of the groups. It is one element however many rollouts there are, so that a page is
    drawn in milliseconds.
    """
    steps = {line.version: line.step for line in visit.run.journal().past.steps}
    by = "version" if kind_of(visit) is Kind.EVALUATION else "epoch"
    columns = [*_COLUMNS, f"passed, by {by}", "fate"]
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    rows = "".join(_row(visit, group, steps) for group in page.groups)
    begin = '<table class="plain groups" aria-label="groups" data-test="groups">'
    return f'<div class="scroll">{begin}<tr>{head}</tr>{rows}</table></div>'


def _row(visit: PageRequest, group: GroupView, steps: Mapping[int, int]) -> str:
    key = group.key
    task = group.task
    link = visit.link("groups", task=task.id, source=task.source, kind=visit.query.get("kind"))
    rollouts = "".join(_rollout(visit, rollout) for rollout in group.rollouts)
    made_of = [f"{name} {number(value)}" for name, value in components(group).items()]
    passed = [f"{score.epoch}: {score.passed}/{score.scored}" for score in group.epochs]
    cells = [
        f'<a href="{escape(link)}">{escape(task.id)}</a> {escape(_question(group))}',
        escape(task.source),
        f'<span class="rollouts">{rollouts or "none has ended"}</span>{_errors(group)}',
        number(group.mean),
        number(group.spread),
        escape(", ".join(made_of)),
        escape(", ".join(passed)),
        _fate(visit, group, steps),
    ]
    name = f"{key.epoch}-{key.index}-{key.attempt}"
    columns = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr data-test="group {name}">{columns}</tr>'


def _question(group: GroupView) -> str:
    """The question of the task, cut to `MAX_LETTERS`."""
    text = _whole_question(group.task.data)
    return text if len(text) <= MAX_LETTERS else text[:MAX_LETTERS] + "…"


def _whole_question(data: Mapping[str, Json]) -> str:
    """Returns the task's question, as far as the task holds it in words."""
    for name in ("question", "prompt", "word"):
        value = data.get(name)
        if isinstance(value, str):
            if value:
                return value
            break
    messages = data.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        return str(messages[-1].get("content", ""))
    return ""


def _rollout(visit: PageRequest, rollout: RolloutBrief) -> str:
    link = conversation_link(visit, rollout.key)
    if rollout.failure is None:
        text = number(rollout.reward)
        kind = ""
    else:
        text = f"✕ {rollout.failure}"
        kind = "failed"
    title = rollout.error
    if not title:
        title = f"{rollout.num_trainable} tokens, {rollout.seconds:.1f} s"
        if rollout.truncated:
            title += ", truncated"
    classes = f"{kind} found" if rollout.found else kind
    attributes = f'class="{classes}" href="{escape(link)}" title="{escape(title)}"'
    return f'<a {attributes} data-test="rollout {rollout.key}">{escape(text)}</a>'


def components(group: GroupView) -> dict[str, float]:
    """The means of a group's reward components over its rollouts, by name."""
    return means(rollout.components for rollout in group.rollouts)


def _fate(visit: PageRequest, group: GroupView, steps: Mapping[int, int]) -> str:
    step = None if group.version is None else steps.get(group.version)
    if step is None:
        return escape(group.fate)
    link = escape(visit.link("groups", step=step))
    return f'<a href="{link}">step {step}</a>: {escape(group.fate)}'


def _errors(group: GroupView) -> str:
    """Returns the reasons why rollouts of the group failed, each once."""
    failed = [rollout for rollout in group.rollouts if rollout.reward is None]
    errors = dict.fromkeys(rollout.error or "no reward, and no error" for rollout in failed)
    notes = [
        f'<div class="note" data-test="why">{escape(shortened(error))}</div>' for error in errors
    ]
    return "".join(notes)
