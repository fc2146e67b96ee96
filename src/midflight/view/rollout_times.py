"""When rollouts were made: a track for each of them, with its turns, and what lay between."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise

from midflight.archive.runs import ArchivedRun
from midflight.archive.times import Times, part_from
from midflight.observe.timeline import RolloutTimed
from midflight.types import GroupKey, TurnTimes
from midflight.view.bars import WAITING, Bar
from midflight.view.charting import version_color

FIRST_TOKEN = "rgba(140,150,161,0.35)"


def rollouts_of_step(
    run: ArchivedRun, step: int, groups: Collection[GroupKey]
) -> list[RolloutTimed]:
    """The times of the rollouts of these groups, which the step was made on. What a step trains on
    was begun in the time of the versions that it may be old.
    """
    oldest = int(run.config().get("rollout", {}).get("max_staleness", 0))
    since = 0.0
    for line in run.readings.past.steps:
        if line.step == step - oldest - 1:
            since = line.seconds - line.step_seconds
    times = Times(run.folder, part_from(run.folder, since))
    times.refresh()
    keys = {(group.epoch, group.index, group.attempt) for group in groups}
    return [rollout for rollout in times.rollouts if rollout.key[:3] in keys]


def rollout_tracks(
    rollouts: Iterable[RolloutTimed], link: Callable[[RolloutTimed], str]
) -> dict[str, Sequence[Bar]]:
    """The bars of each rollout, in the order in which they began. `link` gives the address that its
    bars lead to. Tries of the same rollout are on one track.
    """
    tracks: dict[str, list[Bar]] = {}
    for rollout in sorted(rollouts, key=lambda each: (each.began, each.key)):
        name = "-".join(map(str, rollout.key))
        tracks.setdefault(name, []).extend(_bars(rollout, link(rollout)))
    return {name: bars for name, bars in tracks.items() if bars}


def num_mixed(rollouts: Iterable[RolloutTimed]) -> int:
    """The number of rollouts whose tokens several versions made."""
    count = 0
    for rollout in rollouts:
        made = {version for turn in rollout.turns for version, _ in turn.sampled}
        count += len(made) > 1
    return count


def _bars(rollout: RolloutTimed, link: str) -> Iterator[Bar]:
    *_, sample = rollout.key
    turns = sorted(rollout.turns, key=lambda turn: turn.began)
    end = rollout.began
    for number, turn in enumerate(turns, start=1):
        if turn.began > end:
            yield Bar(end, turn.began, f"sample {sample}: the agent and its tools", WAITING, link)
        yield from _turn(turn, f"sample {sample}, turn {number} of {len(turns)}", link)
        end = max(end, turn.ended)
    if rollout.ended > end:
        yield Bar(end, rollout.ended, f"sample {sample}: the agent and its reward", WAITING, link)


def _turn(turn: TurnTimes, name: str, link: str) -> Iterator[Bar]:
    """The wait for the first token, then a bar for each version."""
    begins = [at for _, at in turn.sampled]
    first = begins[0] if begins else turn.ended
    if first > turn.began:
        yield Bar(turn.began, first, f"{name}: until its first token", FIRST_TOKEN, link)
    for (version, _), (began, ended) in zip(
        turn.sampled, pairwise([*begins, turn.ended]), strict=True
    ):
        yield Bar(began, ended, f"{name}: version {version}", version_color(version), link)
