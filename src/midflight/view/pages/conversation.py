"""The page of one rollout: what the agent saw beside what is trained, each token in the colour of
what is asked about it.
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
    BranchSeen,
    ConversationSeen,
    TokenUse,
    as_curl,
    as_json,
    as_shell,
    conversation_of,
)
from midflight.archive.messages import MessageSaid
from midflight.errors import MidflightError
from midflight.observe.readable import number
from midflight.types import GroupKey, RolloutKey
from midflight.view.looks import facts, section
from midflight.view.pages.groups import conversation_link, kind_of
from midflight.view.visit import Visit

SCALE = ("68,1,84", "59,82,139", "33,144,140", "93,201,99", "253,231,37")
"""Red, green and blue of viridis, dark to light: even to the eye, and told apart without red and
green. As a tint under the page's own text.
"""
MANY = (
    "0,114,178",
    "213,94,0",
    "0,158,115",
    "204,121,167",
    "230,159,0",
    "86,180,233",
    "138,109,59",
    "127,127,127",
)
GAIN = "0,114,178"
LOSS = "213,94,0"
MAX_TOKENS = 20_000
"""Of a branch that are drawn; longer ones are in the JSON whole."""

STYLE = """
.said { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1.4fr); gap: 4px 20px; width: 100%; padding: 8px 0; border-bottom: 1px solid var(--line); }
@media (max-width: 800px) { .said { grid-template-columns: minmax(0, 1fr); } }
.said h3 { grid-column: 1 / -1; font-size: .85rem; font-weight: 700; margin: 0; }
.said pre, .tokens { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: .85rem; font-family: ui-monospace, monospace; line-height: 1.7; }
.said .thinks { border-left: 3px solid var(--line); padding-left: 8px; font-style: italic; }
.tokens span { border-radius: 3px; padding: 1px 0; }
.tokens .t { text-decoration: underline; text-decoration-thickness: 2px; text-underline-offset: 4px; }
.tokens .r { color: var(--note); }
.tokens [data-tip]:hover, .tokens [data-tip]:focus { outline: 2px solid #E69F00; }
.tokens [data-tip]:hover::after, .tokens [data-tip]:focus::after { content: attr(data-tip); position: fixed; left: 8px; right: 8px; bottom: 8px; z-index: 9;
  background: #222; color: #fff; border: 1px solid #888; border-radius: 6px; padding: 8px 12px; white-space: pre-wrap; font: .85rem/1.4 ui-monospace, monospace; }
.colours { display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: center; font-size: .875rem; }
.colours .key { padding: 0 8px; border-radius: 3px; }
.colours [aria-current] { font-weight: 700; text-decoration: none; }
.take { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; max-height: 20rem; overflow: auto; }
"""


@dataclass(frozen=True, slots=True)
class Tint:
    """What tokens can be coloured by: of each token its tint (none for those it says nothing of),
    and what the tints mean.
    """

    title: str
    of: Callable[[BranchSeen], tuple[list[str | None], list[tuple[str, str]]]]


async def draw(visit: Visit) -> None:
    key, tint = _asked(visit)
    ui.add_head_html(f"<style>{STYLE}</style>")
    waits = ui.label("reading the conversation").classes("note").props("aria-live=polite")
    place = ui.column().classes("w-full gap-1")

    async def load() -> None:
        """After the page is there: the first advantages of a viewer take seconds, in which torch is
        loaded.
        """
        try:
            seen = await asyncio.to_thread(conversation_of, visit.run.folder, key)
        except MidflightError as error:
            waits.text = str(error)
            waits.props("role=alert data-test=problem")
            return
        waits.delete()
        with place:
            _show(visit, seen, tint)

    ui.timer(0.0, load, once=True)


def _asked(visit: Visit) -> tuple[RolloutKey, str]:
    try:
        epoch, position, attempt, sample = (
            int(visit.query[name]) for name in ("epoch", "position", "attempt", "sample")
        )
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
    return RolloutKey(GroupKey(epoch, position, attempt), sample, kind_of(visit)), tint


def _show(visit: Visit, seen: ConversationSeen, tint: str) -> None:
    task = seen.group.task
    rollout = seen.rollout
    facts(
        [
            ("source", task.source),
            ("task", task.id),
            ("reward", number(rollout.reward) if rollout else "not ended"),
            ("group's mean", number(seen.group.mean)),
            ("advantage", _advantage(seen)),
            ("fate", seen.group.fate),
        ]
    )
    if rollout is not None and rollout.reward is None:
        ui.label(
            f"It has no reward: {rollout.error or 'its environment gave none, without an error'}"
        ).classes("trouble").props("role=alert data-test=error")
    made_of = {**(rollout.components if rollout else {}), **(rollout.metrics if rollout else {})}
    if made_of:
        ui.label(", ".join(f"{name} {number(value)}" for name, value in made_of.items())).classes(
            "note"
        ).props("data-test=components")
    ui.html(_links(visit, seen), sanitize=False)
    if not seen.branches:
        ui.label("Nothing of it can be trained on, so its tokens are not kept.").classes("note")
        return
    section(
        "Conversation",
        (
            "Left what the agent saw, right the tokens that the model read and wrote; those "
            "trained on are underlined."
        ),
    )
    ui.html(_tints(visit, tint, seen.branches), sanitize=False)
    if "advantage" in tint:
        ui.label(seen.credit).classes("note")
    for at, branch in enumerate(seen.branches):
        if len(seen.branches) > 1:
            shared = (
                f", which goes on from token {branch.shared} of another" if branch.shared else ""
            )
            role = f", of {branch.row.role}" if branch.row.role else ""
            section(f"Branch {at + 1} of {len(seen.branches)}{role}{shared}")
        ui.html(_branch(branch, tint), sanitize=False).classes("w-full")
    _difference(seen)
    _take(seen, visit.run.folder)


def _advantage(seen: ConversationSeen) -> str:
    """Of the rollout, or the least and the most of its answers."""
    found = np.concatenate(
        [branch.advantages[~np.isnan(branch.advantages)] for branch in seen.branches]
        or [np.zeros(0)]
    )
    if not len(found):
        return number(None)
    least = float(found.min())
    most = float(found.max())
    return number(least) if least == most else f"{number(least)} to {number(most)}"


def _links(visit: Visit, seen: ConversationSeen) -> str:
    task = seen.group.task
    kind = visit.query.get("kind")
    step = next(
        (
            line.step
            for line in visit.run.journal().past.steps
            if line.version == seen.group.version
        ),
        None,
    )
    links = [
        (
            f"all groups of task {task.id}",
            visit.link("groups", task=task.id, source=task.source, kind=kind),
        )
    ]
    if step is not None:
        links.append((f"groups of step {step}", visit.link("groups", step=step)))
    if seen.rollout is not None and seen.rollout.failure is not None:
        links.append(
            (
                f"all that failed with {seen.rollout.failure}",
                visit.link("groups", failure=seen.rollout.failure, kind=kind),
            )
        )
    for rollout in seen.group.rollouts:
        if rollout.key != seen.key:
            links.append(
                (
                    f"sample {rollout.key.sample}: {rollout.failure or number(rollout.reward)}",
                    conversation_link(visit, rollout.key),
                )
            )
    made = "".join(f'<a href="{escape(to)}">{escape(text)}</a>' for text, to in links)
    return f'<nav class="colours" aria-label="Related">{made}</nav>'


# --- Tokens ---------------------------------------------------------------------------------------


def _branch(branch: BranchSeen, tint: str) -> str:
    colours, _ = TINTS[tint].of(branch)
    return "".join(
        _message(branch, said, colours) for said in branch.messages if said.begin < MAX_TOKENS
    )


def _message(branch: BranchSeen, said: MessageSaid, colours: Sequence[str | None]) -> str:
    parts = (
        [f'<pre class="thinks" data-test="thinking">{escape(said.reasoning)}</pre>']
        if said.reasoning
        else []
    )
    parts += [f"<pre>{escape(said.content)}</pre>"] if said.content else []
    parts += [
        f'<pre data-test="call">calls {escape(call.name)}\n{escape(_pretty(call.arguments))}</pre>'
        for call in said.calls
    ]
    tokens = "".join(
        _token(branch, at, colours[at]) for at in range(said.begin, min(said.end, MAX_TOKENS))
    )
    title = f"{said.role}{' (the model)' if said.written else ''}, {said.end - said.begin} tokens"
    return (
        f'<section class="said" data-test="{escape(said.role)}"><h3>{escape(title)}</h3>'
        f'<div>{"".join(parts)}</div><div class="tokens" '
        f'data-test="tokens">{tokens}</div></section>'
    )


def _pretty(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), indent=2, ensure_ascii=False)
    except ValueError:
        return arguments


def _token(branch: BranchSeen, at: int, colour: str | None) -> str:
    text = branch.pieces[at]
    shown = escape(text).replace("\n", "⏎\n") if text else "·"
    if not branch.row.generated[at]:
        tip = escape(
            f"token {at}: {branch.row.token_ids[at]}, {text!r}\nread, not written by the model"
        )
        return f'<span class="r" data-tip="{tip}">{shown}</span>'
    kind = ' class="t"' if branch.row.loss_mask[at] else ""
    style = f' style="background: rgba({colour})"' if colour else ""
    return f'<span{kind}{style} tabindex="0" data-tip="{escape(_tip(branch, at))}">{shown}</span>'


def _tip(branch: BranchSeen, at: int) -> str:
    row = branch.row
    logprob = float(branch.row.logprobs[at])
    version = int(row.versions[at])
    keys = int(row.kv_versions[at])
    lines = [
        f"token {at}: {row.token_ids[at]}, {branch.pieces[at]!r}",
        f"version {version}"
        + ("" if keys == version else f", keys and values of version {keys}")
        + f", age {branch.ages[at]}",
        f"log-probability {logprob:.3f} (probability {np.exp(logprob):.3f})",
        (
            "advantage "
            f"{number(None if np.isnan(branch.advantages[at]) else float(branch.advantages[at]))}"
        ),
        f"entropy about {branch.entropies[at]:.3f} nats",
        f"mask: {branch.uses[at]}",
    ]
    return "\n".join(lines)


# --- Colours --------------------------------------------------------------------------------------


def _graded(
    values: np.ndarray, title: str, *, bounds: Sequence[float]
) -> tuple[list[str | None], list[tuple[str, str]]]:
    """By `bounds` between the steps of the scale; NaN has no tint."""
    steps = np.searchsorted(np.asarray(bounds), values)
    tints = [
        None if np.isnan(value) else f"{SCALE[step]}, .5"
        for value, step in zip(values.tolist(), steps.tolist(), strict=True)
    ]
    names = [f"below {bounds[0]:g}", *(f"from {low:g}" for low in bounds)]
    return tints, [
        (f"{title} {name}", f"{colour}, .5") for name, colour in zip(names, SCALE, strict=False)
    ]


def _named(values: Sequence[str | None]) -> tuple[list[str | None], list[tuple[str, str]]]:
    """A tint for each value."""
    names = sorted({value for value in values if value is not None})
    tint = {name: f"{MANY[at % len(MANY)]}, .4" for at, name in enumerate(names)}
    return [None if value is None else tint[value] for value in values], list(tint.items())


def _version(branch: BranchSeen) -> tuple[list[str | None], list[tuple[str, str]]]:
    pairs = zip(branch.row.versions.tolist(), branch.row.generated.tolist(), strict=True)
    return _named([f"version {version}" if generated else None for version, generated in pairs])


def _logprob(branch: BranchSeen) -> tuple[list[str | None], list[tuple[str, str]]]:
    return _graded(
        np.where(branch.row.generated, branch.row.logprobs, np.nan),
        "log p",
        bounds=(-5, -2, -0.7, -0.1),
    )


def _entropy(branch: BranchSeen) -> tuple[list[str | None], list[tuple[str, str]]]:
    return _graded(branch.entropies, "nats", bounds=(0.1, 0.3, 0.8, 1.5))


def _age(branch: BranchSeen) -> tuple[list[str | None], list[tuple[str, str]]]:
    return _graded(
        np.where(branch.ages >= 0, branch.ages, np.nan).astype(float),
        "age",
        bounds=(0.5, 1.5, 3.5, 7.5),
    )


def _gain(branch: BranchSeen) -> tuple[list[str | None], list[tuple[str, str]]]:
    known = branch.advantages
    tints = [
        None
        if np.isnan(a) or not a
        else f"{GAIN if a > 0 else LOSS}, {min(0.15 + abs(a) / 3, 0.7):.2f}"
        for a in known.tolist()
    ]
    return tints, [
        ("made likelier (above 0)", f"{GAIN}, .5"),
        ("made less likely (below 0)", f"{LOSS}, .5"),
    ]


def _use(branch: BranchSeen) -> tuple[list[str | None], list[tuple[str, str]]]:
    return _named([None if use == TokenUse.READ else str(use) for use in branch.uses])


TINTS = {
    "use": Tint("mask and why", _use),
    "version": Tint("version", _version),
    "logprob": Tint("log-probability", _logprob),
    "advantage": Tint("advantage", _gain),
    "entropy": Tint("entropy (estimated)", _entropy),
    "age": Tint("age", _age),
}


def _tints(visit: Visit, chosen: str, branches: Sequence[BranchSeen]) -> str:
    links = "".join(
        _tint_link(visit, name, tint, chosen=name == chosen) for name, tint in TINTS.items()
    )
    keys = dict(pair for branch in branches for pair in TINTS[chosen].of(branch)[1])
    meaning = "".join(
        f'<span class="key" style="background: rgba({tint})">{escape(name)}</span>'
        for name, tint in keys.items()
    )
    return (
        '<div class="colours" role="group" aria-label="Colour of tokens">coloured by '
        f'{links}</div><div class="colours">{meaning}</div>'
    )


def _tint_link(visit: Visit, name: str, tint: Tint, *, chosen: bool) -> str:
    to = f"?{escape(urlencode({**visit.query, 'color': name}))}"
    here = ' aria-current="true"' if chosen else ""
    return f'<a href="{to}" data-test="color {name}"{here}>{tint.title}</a>'


# --- What differs, and what can be taken along ----------------------------------------------------


def _difference(seen: ConversationSeen) -> None:
    """Between what the agent got and what is trained."""
    section("Seen and trained")
    uses = Counter(str(use) for branch in seen.branches for use in branch.uses)
    lines = [f"{count} tokens: {use}" for use, count in uses.most_common()]
    if seen.rollout is not None:
        lost = {
            why: count
            for (_, why), count in seen.rollout.tokens.items()
            if why is not None and why not in uses
        }
        lines += [
            f"{count} tokens that the model wrote are in no row: {why}"
            for why, count in lost.items()
        ]
    with ui.element("ul").props("data-test=difference"):
        for line in lines:
            with ui.element("li"):
                ui.label(line)


def _take(seen: ConversationSeen, folder: Path) -> None:
    section("Take it along")
    texts = {
        "JSON": json.dumps(as_json(seen), ensure_ascii=False),
        "curl": as_curl(seen),
        "shell": as_shell(seen, folder),
    }
    for name, text in texts.items():
        with ui.row().classes("items-center"):
            ui.button(
                f"Copy as {name}" if name != "shell" else "Copy a replay for a shell",
                on_click=lambda _, t=text: _copy(t),
            ).props(f'outline no-caps dense color=null data-test="copy {name}"')
        shown = text if len(text) <= 20_000 else text[:20_000] + " …"
        ui.html(
            (
                f'<details><summary>{name}</summary><pre class="take" '
                f'tabindex="0">{escape(shown)}</pre></details>'
            ),
            sanitize=False,
        ).classes("w-full")


def _copy(text: str) -> None:
    ui.clipboard.write(text)
    ui.notify("copied")
