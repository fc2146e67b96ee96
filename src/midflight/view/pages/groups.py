"""The page of a run's groups. Filters, words and sorting are in its address. Each rollout leads to
its conversation.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from urllib.parse import urlencode

from nicegui import ui

from midflight.archive.groups import (
    UNDER_WAY,
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
from midflight.observe.readable import number
from midflight.observe.timeline import RolloutTimed
from midflight.trajectories.database import State
from midflight.types import GroupKey, Json, Kind, Reason, RolloutKey
from midflight.view import widgets
from midflight.view.bars import figure, follow
from midflight.view.rollout_times import num_mixed, rollout_tracks, rollouts_of_step
from midflight.view.visit import PageRequest

ON_A_PAGE = 25
REFRESH_SECONDS = 5.0
GROW_SECONDS = 0.25
"""The seconds for which words are indexed before a page is shown, and at each refresh after
that.
"""
MAX_LETTERS = 140
"""The number of letters of a question that are shown."""

CHART_HEIGHT = 420
"""Pixels of the chart of a step's rollouts, as far as each has from 4 to 16 of them."""
LEAST_HEIGHT = 4
MOST_HEIGHT = 16
MAX_EPOCHS = 8
"""The number of epochs, or of evaluations, whose results are shown: the last ones."""

ORDERS = {
    GroupOrder.NEWEST: "newest",
    GroupOrder.OLDEST: "oldest",
    GroupOrder.WORST: "lowest reward",
    GroupOrder.BEST: "highest reward",
    GroupOrder.SPREAD: "largest spread",
    GroupOrder.LONGEST: "longest",
    GroupOrder.FAILED: "most failures",
}
FATES = {state.value: state.value.replace("_", " ") for state in State} | {
    reason.value: f"dropped: {reason}" for reason in Reason
}
FATE_TAGS = {State.TRAINED: "good", State.DROPPED: "warn", State.LEASED: "live"}


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
        counted = _counted(page, wanted, first)
        if indexed is None or indexed.complete:
            return page, counted, REFRESH_SECONDS
        so_far = f"looked through {indexed.done:,} of {indexed.total:,} rollouts so far"
        return page, f"{counted}; {so_far}", GROW_SECONDS

    page, counted, wait = await look()
    ui.html(_form(visit, page), sanitize=False).classes("w-full")
    with ui.element("div").classes("head"):
        note = ui.label(counted).classes("note").props("data-test=counted aria-live=polite")
        ui.html(_legend(page), sanitize=False)
    await _when_made(visit, page)
    with widgets.panel():
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
        only_ended=not query.get("fate") and not visit.run.is_live,
    )
    return wanted, GroupOrder(order), (int(page) - 1) * ON_A_PAGE


async def _when_made(visit: PageRequest, page: GroupPage) -> None:
    """Draws when the rollouts of these groups were made, if they are those of one step."""
    if not visit.query.get("step") or kind_of(visit) is not Kind.TRAINING:
        return
    keys = [group.key for group in page.groups]
    made = await asyncio.to_thread(rollouts_of_step, visit.run, int(visit.query["step"]), keys)
    drawn = rollout_tracks(made, lambda each: conversation_link(visit, _key(each)))
    if not drawn:
        return
    with widgets.panel():
        widgets.section(
            "When they were made",
            f"{len(drawn):,} rollouts, {num_mixed(made):,} of several versions. Each is a line: its "
            "tokens in the colour of the version that made them, the wait for a first token pale, "
            "the agent, its tools and its reward grey. A click leads to the conversation.",
        )
        height = min(MOST_HEIGHT, max(LEAST_HEIGHT, CHART_HEIGHT // len(drawn)))
        chart = ui.plotly(figure(drawn, height=height, named=False)).style("width: 100%")
        chart.props('role="img" aria-label="When they were made" data-test="chart rollouts"')
        chart.on("plotly_click", follow)


def _key(rollout: RolloutTimed) -> RolloutKey:
    epoch, index, attempt, sample = rollout.key
    return RolloutKey(GroupKey(epoch, index, attempt), sample)


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


def counted_by(visit: PageRequest) -> str:
    """A task is drawn once an epoch, and a held-out task is asked of a version."""
    return "version" if kind_of(visit) is Kind.EVALUATION else "epoch"


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
        _choice("First", "sort", orders, query, None),
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


def _counted(page: GroupPage, wanted: GroupFilter, first: int) -> str:
    if not page.total:
        return "no group is like that"
    counted = f"groups {first + 1:,} to {first + len(page.groups):,} of {page.total:,}"
    cut = sum(page.fates.get(state.value, 0) for state in UNDER_WAY)
    if cut and wanted == GroupFilter(kind=wanted.kind, only_ended=True):
        counted += f"; {cut:,} more were under way when the run ended"
    return counted


def _pager(visit: PageRequest, page: GroupPage, first: int) -> str:
    here = first // ON_A_PAGE + 1
    last = max(1, -(-page.total // ON_A_PAGE))
    places = {"first": 1, "previous": here - 1, "next": here + 1, "last": last}
    links: list[str] = []
    for name, place in places.items():
        if 1 <= place <= last and place != here:
            address = escape(urlencode({**visit.query, "page": place}))
            links.append(f'<a href="?{address}" data-test="{name} page">{name}</a>')
    begin = '<nav class="pager" aria-label="Pages of groups">'
    return f"{begin}page {here:,} of {last:,} {' '.join(links)}</nav>"


# --- The table ------------------------------------------------------------------------------------


def reward_bounds(groups: Iterable[GroupView]) -> tuple[float, float]:
    """The rewards that are drawn lightest and darkest: 0 and 1, unless some lie beyond."""
    rewards = [reward for group in groups for reward in group.rewards]
    return min([0.0, *rewards]), max([1.0, *rewards])


def _place(value: float, bounds: tuple[float, float]) -> float:
    """The place of a reward between the bounds, from 0 to 1."""
    low, high = bounds
    return (value - low) / (high - low)


def _legend(page: GroupPage) -> str:
    low, high = reward_bounds(page.groups)
    return (
        f'<span class="fine scale">reward {low:g} <i></i> {high:g}</span>'
        '<span class="fine">✕ no reward</span>'
    )


def _table(visit: PageRequest, page: GroupPage) -> str:
    """The table of the groups. It is one element however many rollouts there are, so that a page is
    drawn in milliseconds.
    """
    if not page.groups:
        return (
            '<span class="note">Nothing to show: change the filters, or wait for rollouts.</span>'
        )
    steps = {line.version: line.step for line in visit.run.journal().past.steps}
    by = counted_by(visit)
    columns = ("task", "rewards of its rollouts", "mean and spread", f"passed, by {by}", "fate")
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    bounds = reward_bounds(page.groups)
    rows = "".join(_row(visit, group, steps, bounds) for group in page.groups)
    begin = '<table class="plain groups" aria-label="groups" data-test="groups">'
    return f"{begin}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _row(
    visit: PageRequest, group: GroupView, steps: Mapping[int, int], bounds: tuple[float, float]
) -> str:
    key = group.key
    cells = {
        "task": _task(visit, group),
        "rewards": reward_cells(visit, group.rollouts, bounds) + _errors(group),
        "mean": _range(group, bounds),
        "passed": _passed(group, counted_by(visit)),
        "fate": _fate(visit, group, steps),
    }
    name = f"{key.epoch}-{key.index}-{key.attempt}"
    columns = "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in cells.items())
    return f'<tr data-test="group {name}">{columns}</tr>'


def _task(visit: PageRequest, group: GroupView) -> str:
    task = group.task
    link = visit.link("groups", task=task.id, source=task.source, kind=visit.query.get("kind"))
    return (
        f'<a href="{escape(link)}">{escape(task.id)}</a> '
        f'<span class="fine">{escape(task.source)}</span>'
        f'<span class="asked">{escape(_question(group))}</span>'
    )


def _range(group: GroupView, bounds: tuple[float, float]) -> str:
    """The rewards of the group as a bar from the least to the most, with a mark at their mean."""
    numbers = (
        f'<span data-test="mean">{number(group.mean)}</span> '
        f'<span class="fine">spread <span data-test="spread">{number(group.spread)}</span></span>'
    )
    if group.mean is None:
        return numbers
    low = _place(min(group.rewards), bounds)
    high = _place(max(group.rewards), bounds)
    mean = _place(group.mean, bounds)
    bar = (
        f'<span class="range" aria-hidden="true"><i style="left: {low:.1%}; '
        f'width: {high - low:.1%}"></i><b style="left: {mean:.1%}"></b></span>'
    )
    return bar + numbers


def _passed(group: GroupView, by: str) -> str:
    """How often the task was passed, a column for each epoch, and the last one in numbers."""
    if not group.epochs:
        return ""
    columns = "".join(
        f'<i style="--r: {score.rate or 0:.2f}" title="{score.epoch}: '
        f'{score.passed}/{score.scored}"></i>'
        for score in group.epochs[-MAX_EPOCHS:]
    )
    last = group.epochs[-1]
    return (
        f'<span class="columns" aria-hidden="true">{columns}</span>'
        f'{last.passed}/{last.scored} <span class="fine">{by} {last.epoch}</span>'
    )


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


def reward_cells(
    visit: PageRequest,
    rollouts: Sequence[RolloutBrief],
    bounds: tuple[float, float],
    *,
    here: RolloutKey | None = None,
) -> str:
    """A strip of the rollouts of a group, each of which leads to its conversation. `here` is the
    one that the page shows already.
    """
    cells = "".join(
        _rollout(visit, rollout, bounds, is_here=rollout.key == here) for rollout in rollouts
    )
    return f'<div class="cells">{cells or "none has ended"}</div>'


def _rollout(
    visit: PageRequest, rollout: RolloutBrief, bounds: tuple[float, float], *, is_here: bool
) -> str:
    """A cell whose colour is the reward. Its number is shown on hover, and read to those who do not
    see it.
    """
    classes: list[str] = []
    style = ""
    if rollout.failure is not None:
        classes.append("failed")
    elif rollout.reward is not None:
        style = f' style="--r: {_place(rollout.reward, bounds):.2f}"'
    if rollout.found:
        classes.append("found")
    link = escape(conversation_link(visit, rollout.key))
    tip = escape(f"sample {rollout.key.sample}: {_told(rollout)}")
    mark = "" if rollout.failure is None else "✕"
    current = ' aria-current="page"' if is_here else ""
    return (
        f'<a class="{" ".join(classes)}"{style}{current} href="{link}" data-tip="{tip}" '
        f'aria-label="{tip}" data-test="rollout {rollout.key}">{mark}</a>'
    )


def _told(rollout: RolloutBrief) -> str:
    """The reward, what it is made of and what the rollout took; or why there is no reward."""
    if rollout.failure is not None:
        return shortened(f"no reward: {rollout.error or rollout.failure}")
    parts = [number(rollout.reward)]
    parts += [f"{name} {number(value)}" for name, value in rollout.components.items()]
    parts += [f"{rollout.num_trainable} tokens", f"{rollout.seconds:.1f} s"]
    if rollout.truncated:
        parts.append("truncated")
    return ", ".join(parts)


def _fate(visit: PageRequest, group: GroupView, steps: Mapping[int, int]) -> str:
    """The state as a tag, and the version that the step made or that answered, in its colour."""
    state = FATES[group.reason.value if group.reason else group.state.value]
    if group.state in UNDER_WAY and not visit.run.is_live:
        state = "not finished"
    made = group.key.epoch if group.state is State.EVALUATED else group.version
    shown = widgets.tag(state, FATE_TAGS.get(group.state, ""), title=group.fate)
    if made is None:
        return shown
    shown += f"<br>{widgets.version(made)}"
    step = steps.get(made)
    if step is None or group.state is State.EVALUATED:
        return shown
    return f'{shown}, <a href="{escape(visit.link("groups", step=step))}">step {step}</a>'


def _errors(group: GroupView) -> str:
    """Returns the reasons why rollouts of the group failed, each once."""
    failed = [rollout for rollout in group.rollouts if rollout.reward is None]
    errors = dict.fromkeys(rollout.error or "no reward, and no error" for rollout in failed)
    notes = [
        f'<div class="note" data-test="why">{escape(shortened(error))}</div>' for error in errors
    ]
    return "".join(notes)
