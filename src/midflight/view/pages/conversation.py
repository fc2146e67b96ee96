"""The page of one rollout: the tokens that the agent saw beside those that are trained. The colour
of a token shows the chosen property.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
from nicegui import ui

from midflight.archive.conversation import (
    BranchView,
    ConversationView,
    TokenUse,
    as_curl,
    as_json,
    as_shell,
    conversation_of,
)
from midflight.archive.messages import RecordedMessage
from midflight.errors import MidflightError
from midflight.observe.readable import UNKNOWN, number
from midflight.observe.timeline import RolloutTimed
from midflight.types import GroupKey, Kind, RolloutKey
from midflight.view.bars import figure
from midflight.view.charting import COLORS, channels, version_color
from midflight.view.pages.groups import kind_of, reward_bounds, reward_cells
from midflight.view.rollout_times import num_mixed, rollout_tracks, rollouts_of_step
from midflight.view.visit import PageRequest
from midflight.view.widgets import facts, panel, section, two_columns

SCALE = ("68 1 84", "59 82 139", "33 144 140", "93 201 99", "253 231 37")
"""Red, green and blue of viridis from dark to light. They are even to the eye, and can be told
apart without red and green. They are tints under the page's own text.
"""
GAIN = "0 114 178"
LOSS = "213 94 0"
MAX_TOKENS = 20_000
"""The number of tokens of a branch that are drawn. The JSON has all of them."""
TRACK_HEIGHT = 16
"""Pixels of the line of one try of the rollout."""


@dataclass(frozen=True, slots=True)
class TokenColouring:
    """A property that tokens can be coloured by. `of` gives the tint of each token, or None if the
    token does not have the property, and the meanings of the tints.
    """

    title: str
    of: Callable[[BranchView], tuple[list[str | None], list[tuple[str, str]]]]


async def draw(visit: PageRequest) -> None:
    key, tint = _asked(visit)
    waits = ui.label("reading the conversation").classes("note").props("aria-live=polite")
    place = ui.element("div").classes("sheet")

    async def load() -> None:
        """Loads the conversation after the page is there: the first advantages of a viewer take
        seconds, in which torch is loaded.
        """
        try:
            seen = await asyncio.to_thread(conversation_of, visit.run.folder, key)
        except MidflightError as error:
            waits.text = str(error)
            waits.props("role=alert data-test=problem")
            return
        times = await asyncio.to_thread(_times, visit, seen)
        waits.delete()
        with place:
            _show(visit, seen, times, tint)

    ui.timer(0.0, load, once=True)


def _asked(visit: PageRequest) -> tuple[RolloutKey, str]:
    try:
        group = GroupKey(
            int(visit.query["epoch"]), int(visit.query["position"]), int(visit.query["attempt"])
        )
        sample = int(visit.query["sample"])
    except (KeyError, ValueError):
        raise MidflightError(
            "the address names no rollout: it needs epoch, position, attempt and sample, each a "
            "whole number."
        ) from None
    tint = visit.query.get("color", "use")
    if tint not in TINTS:
        raise MidflightError(
            f"tokens are not coloured by {tint!r}; they are by {', '.join(TINTS)}."
        )
    return RolloutKey(group, sample, kind_of(visit)), tint


def _step(visit: PageRequest, seen: ConversationView) -> int | None:
    """The step that was made on the rollout."""
    for line in visit.run.journal().past.steps:
        if line.version == seen.group.version:
            return line.step
    return None


def _times(visit: PageRequest, seen: ConversationView) -> list[RolloutTimed]:
    """When the tries of the rollout were made, if a step was made on it."""
    step = _step(visit, seen)
    if step is None or seen.key.kind is not Kind.TRAINING:
        return []
    of_group = rollouts_of_step(visit.run, step, [seen.key.group])
    return [each for each in of_group if each.key[-1] == seen.key.sample]


def _show(
    visit: PageRequest, seen: ConversationView, times: Sequence[RolloutTimed], tint: str
) -> None:
    task = seen.group.task
    rollout = seen.rollout
    with panel().classes("tight"):
        facts(
            [
                ("source", task.source),
                ("task", task.id),
                ("reward", number(rollout.reward) if rollout else "not ended"),
                ("group's mean", number(seen.group.mean)),
                ("advantage", _advantage(seen)),
                ("fate", seen.group.fate),
                ("took", f"{rollout.seconds:.1f} s" if rollout else "goes on"),
                ("sampled by", _versions(seen)),
            ]
        )
        bounds = reward_bounds([seen.group])
        cells = reward_cells(visit, seen.group.rollouts, bounds, here=seen.key)
        strip = f'<span class="note">rollouts of this task in the group</span>{cells}'
        ui.html(strip, sanitize=False).classes("strip")
    if rollout is not None and rollout.reward is None:
        why = rollout.error or "its environment gave none, without an error"
        trouble = ui.label(f"It has no reward: {why}").classes("trouble")
        trouble.props("role=alert data-test=error")
    made_of = {**rollout.components, **rollout.metrics} if rollout else {}
    if made_of:
        parts = [f"{name} {number(value)}" for name, value in made_of.items()]
        ui.label(", ".join(parts)).classes("note").props("data-test=components")
    ui.html(_links(visit, seen), sanitize=False)
    _when_made(times)
    if not seen.branches:
        ui.label("Nothing of it can be trained on, so its tokens are not kept.").classes("note")
        return
    with panel():
        section(
            "Conversation",
            "Left what the agent saw, right the tokens that the model read and wrote; those "
            "trained on are underlined.",
        )
        ui.html(_tints(visit, tint, seen.branches), sanitize=False)
        if "advantage" in tint:
            ui.label(seen.credit).classes("note")
    for at, branch in enumerate(seen.branches):
        if len(seen.branches) > 1:
            title = f"Branch {at + 1} of {len(seen.branches)}"
            if branch.row.role:
                title += f", of {branch.row.role}"
            if branch.shared:
                title += f", which goes on from token {branch.shared} of another"
            section(title)
        with panel().classes("w-full"):
            ui.html(_branch(branch, tint), sanitize=False).classes("w-full")
    with two_columns():
        with panel():
            _difference(seen)
        with panel():
            _take(seen, visit.run.folder)


def _when_made(times: Sequence[RolloutTimed]) -> None:
    """Draws the turns of the rollout, if there were several or several versions sampled them."""
    num_turns = sum(len(each.turns) for each in times)
    if num_turns < 2 and not num_mixed(times):
        return
    with panel():
        section(
            "When it was made",
            f"{num_turns} turn{'s' if num_turns > 1 else ''}: the wait for a first token is pale, "
            "tokens have the colour of the version that sampled them, the agent, its tools and its "
            "reward are grey.",
        )
        tracks = rollout_tracks(times, lambda each: "")
        chart = ui.plotly(figure(tracks, height=TRACK_HEIGHT, named=False)).style("width: 100%")
        chart.props('role="img" aria-label="When it was made" data-test="chart turns"')


def _advantage(seen: ConversationView) -> str:
    """The advantage of the rollout, or the least and the most of its answers."""
    known = [branch.advantages[~np.isnan(branch.advantages)] for branch in seen.branches]
    found = np.concatenate([np.zeros(0), *known])
    if not len(found):
        return number(None)
    least = float(found.min())
    most = float(found.max())
    return number(least) if least == most else f"{number(least)} to {number(most)}"


def _versions(seen: ConversationView) -> str:
    """The versions whose weights sampled its tokens."""
    found = set[int]()
    for branch in seen.branches:
        found.update(branch.row.versions[branch.row.generated].tolist())
    if not found:
        return UNKNOWN
    if len(found) == 1:
        return f"version {min(found)}"
    return f"versions {min(found)} to {max(found)}"


def _links(visit: PageRequest, seen: ConversationView) -> str:
    task = seen.group.task
    kind = visit.query.get("kind")
    of_task = visit.link("groups", task=task.id, source=task.source, kind=kind)
    links = [(f"all groups of task {task.id}", of_task)]
    step = _step(visit, seen)
    if step is not None:
        links.append((f"groups of step {step}", visit.link("groups", step=step)))
    failure = None if seen.rollout is None else seen.rollout.failure
    if failure is not None:
        alike = visit.link("groups", failure=failure, kind=kind)
        links.append((f"all that failed with {failure}", alike))
    made = "".join(f'<a href="{escape(to)}">{escape(text)}</a>' for text, to in links)
    return f'<nav class="colours" aria-label="Related">{made}</nav>'


# --- Tokens ---------------------------------------------------------------------------------------


def _branch(branch: BranchView, tint: str) -> str:
    colours, _ = TINTS[tint].of(branch)
    return "".join(
        _message(branch, said, colours) for said in branch.messages if said.begin < MAX_TOKENS
    )


def _message(branch: BranchView, said: RecordedMessage, colours: Sequence[str | None]) -> str:
    parts: list[str] = []
    if said.reasoning:
        thinks = escape(said.reasoning)
        parts.append(f'<pre class="thinks" data-test="thinking">{thinks}</pre>')
    if said.content:
        parts.append(f"<pre>{escape(said.content)}</pre>")
    for call in said.calls:
        arguments = escape(_pretty(call.arguments))
        parts.append(f'<pre data-test="call">calls {escape(call.name)}\n{arguments}</pre>')
    drawn = range(said.begin, min(said.end, MAX_TOKENS))
    tokens = "".join(_token(branch, at, colours[at]) for at in drawn)
    model = " (the model)" if said.written else ""
    title = f"{said.role}{model}, {said.end - said.begin} tokens"
    return (
        f'<section class="said" data-test="{escape(said.role)}"><h3>{escape(title)}</h3>'
        f"<div>{''.join(parts)}</div>"
        f'<div class="tokens" data-test="tokens">{tokens}</div></section>'
    )


def _pretty(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), indent=2, ensure_ascii=False)
    except ValueError:
        return arguments


def _token(branch: BranchView, at: int, colour: str | None) -> str:
    text = branch.pieces[at]
    shown = escape(text).replace("\n", "⏎\n") if text else "·"
    if not branch.row.generated[at]:
        tip = escape(
            f"token {at}: {branch.row.token_ids[at]}, {text!r}\nread, not written by the model"
        )
        return f'<span class="r" data-tip="{tip}">{shown}</span>'
    kind = ' class="t"' if branch.row.loss_mask[at] else ""
    style = f' style="background: {colour}"' if colour else ""
    return f'<span{kind}{style} tabindex="0" data-tip="{escape(_tip(branch, at))}">{shown}</span>'


def _tip(branch: BranchView, at: int) -> str:
    row = branch.row
    logprob = float(row.logprobs[at])
    advantage = float(branch.advantages[at])
    version = int(row.versions[at])
    keys = int(row.kv_versions[at])
    versions = f"version {version}"
    if keys != version:
        versions += f", keys and values of version {keys}"
    lines = [
        f"token {at}: {row.token_ids[at]}, {branch.pieces[at]!r}",
        f"{versions}, age {branch.ages[at]}",
        f"log-probability {logprob:.3f} (probability {np.exp(logprob):.3f})",
        f"advantage {number(None if np.isnan(advantage) else advantage)}",
        f"entropy about {branch.entropies[at]:.3f} nats",
        f"mask: {branch.uses[at]}",
    ]
    return "\n".join(lines)


# --- Colours --------------------------------------------------------------------------------------


def tinted(colour: str, share: str = "var(--tint)") -> str:
    """A colour under text, as CSS. The page says how strong it is in the light and in the dark."""
    return f"rgb({colour} / {share})"


def _graded(
    values: np.ndarray, title: str, *, bounds: Sequence[float]
) -> tuple[list[str | None], list[tuple[str, str]]]:
    """A step of the scale for each value. `bounds` are between the steps, and NaN has no tint."""
    steps = np.searchsorted(np.asarray(bounds), values)
    tints: list[str | None] = []
    for value, step in zip(values.tolist(), steps.tolist(), strict=True):
        tints.append(None if np.isnan(value) else tinted(SCALE[step]))
    names = [f"below {bounds[0]:g}"] + [f"from {low:g}" for low in bounds]
    meanings = [
        (f"{title} {name}", tinted(colour)) for name, colour in zip(names, SCALE, strict=False)
    ]
    return tints, meanings


def _named(values: Sequence[str | None]) -> tuple[list[str | None], list[tuple[str, str]]]:
    """A tint for each value."""
    names = sorted({value for value in values if value is not None})
    tint_of = {name: tinted(channels(COLORS[at % len(COLORS)])) for at, name in enumerate(names)}
    tints = [None if value is None else tint_of[value] for value in values]
    return tints, list(tint_of.items())


def _version(branch: BranchView) -> tuple[list[str | None], list[tuple[str, str]]]:
    """Tints in the colours that versions have on every page."""
    pairs = zip(branch.row.versions.tolist(), branch.row.generated.tolist(), strict=True)
    versions = [version if generated else None for version, generated in pairs]
    distinct = sorted({version for version in versions if version is not None})
    tint_of = {version: tinted(channels(version_color(version))) for version in distinct}
    tints = [None if version is None else tint_of[version] for version in versions]
    return tints, [(f"version {version}", tint) for version, tint in tint_of.items()]


def _logprob(branch: BranchView) -> tuple[list[str | None], list[tuple[str, str]]]:
    logprobs = np.where(branch.row.generated, branch.row.logprobs, np.nan)
    return _graded(logprobs, "log p", bounds=(-5, -2, -0.7, -0.1))


def _entropy(branch: BranchView) -> tuple[list[str | None], list[tuple[str, str]]]:
    return _graded(branch.entropies, "nats", bounds=(0.1, 0.3, 0.8, 1.5))


def _age(branch: BranchView) -> tuple[list[str | None], list[tuple[str, str]]]:
    ages = np.where(branch.ages >= 0, branch.ages, np.nan).astype(float)
    return _graded(ages, "age", bounds=(0.5, 1.5, 3.5, 7.5))


def _gain(branch: BranchView) -> tuple[list[str | None], list[tuple[str, str]]]:
    tints = [_gain_tint(advantage) for advantage in branch.advantages.tolist()]
    meanings = [
        ("made likelier (above 0)", tinted(GAIN)),
        ("made less likely (below 0)", tinted(LOSS)),
    ]
    return tints, meanings


def _gain_tint(advantage: float) -> str | None:
    if np.isnan(advantage) or not advantage:
        return None
    colour = GAIN if advantage > 0 else LOSS
    return tinted(colour, f"{min(0.15 + abs(advantage) / 3, 0.7):.2f}")


def _use(branch: BranchView) -> tuple[list[str | None], list[tuple[str, str]]]:
    return _named([None if use == TokenUse.READ else str(use) for use in branch.uses])


TINTS = {
    "use": TokenColouring("mask and why", _use),
    "version": TokenColouring("version", _version),
    "logprob": TokenColouring("log-probability", _logprob),
    "advantage": TokenColouring("advantage", _gain),
    "entropy": TokenColouring("entropy (estimated)", _entropy),
    "age": TokenColouring("age", _age),
}


def _tints(visit: PageRequest, chosen: str, branches: Sequence[BranchView]) -> str:
    links = "".join(
        _tint_link(visit, name, tint, chosen=name == chosen) for name, tint in TINTS.items()
    )
    keys: dict[str, str] = {}
    for branch in branches:
        _, meanings = TINTS[chosen].of(branch)
        keys.update(meanings)
    meaning = "".join(
        f'<span class="key" style="background: {tint}">{escape(name)}</span>'
        for name, tint in keys.items()
    )
    return (
        '<div class="colours" role="group" aria-label="Colour of tokens">coloured by '
        f'<span class="seg">{links}</span></div><div class="colours">{meaning}</div>'
    )


def _tint_link(visit: PageRequest, name: str, tint: TokenColouring, *, chosen: bool) -> str:
    to = f"?{escape(urlencode({**visit.query, 'color': name}))}"
    here = ' aria-current="true"' if chosen else ""
    return f'<a href="{to}" data-test="color {name}"{here}>{tint.title}</a>'


# --- What differs, and what can be taken along ----------------------------------------------------


def _difference(seen: ConversationView) -> None:
    """Shows the difference between the tokens that the agent got and those that are trained."""
    section("Seen and trained")
    uses = Counter[str]()
    for branch in seen.branches:
        uses.update(map(str, branch.uses))
    lines = [f"{count} tokens: {use}" for use, count in uses.most_common()]
    if seen.rollout is not None:
        lost: dict[str, int] = {}
        for (_, why), count in seen.rollout.tokens.items():
            if why is not None and why not in uses:
                lost[why] = count
        for why, count in lost.items():
            lines.append(f"{count} tokens that the model wrote are in no row: {why}")
    with ui.element("ul").props("data-test=difference"):
        for line in lines:
            with ui.element("li"):
                ui.label(line)


def _take(seen: ConversationView, folder: Path) -> None:
    section("Take it along")
    texts = {
        "JSON": json.dumps(as_json(seen), ensure_ascii=False),
        "curl": as_curl(seen),
        "shell": as_shell(seen, folder),
    }
    with ui.element("div").classes("colours"):
        for name, text in texts.items():
            title = "Copy a replay for a shell" if name == "shell" else f"Copy as {name}"
            button = ui.button(title, on_click=lambda _, t=text: _copy(t))
            button.props(f'outline no-caps dense color=null data-test="copy {name}"')
    for name, text in texts.items():
        shown = text if len(text) <= 20_000 else text[:20_000] + " …"
        content = f'<pre class="take" tabindex="0">{escape(shown)}</pre>'
        details = f"<details><summary>{name}</summary>{content}</details>"
        ui.html(details, sanitize=False).classes("w-full")


def _copy(text: str) -> None:
    ui.clipboard.write(text)
    ui.notify("copied")
