"""Writes numbers, durations, sizes and shares for people."""

from midflight.observe.status import SourceStatus
from midflight.types import UnclaimedRollouts

UNKNOWN = "–"


def number(value: float | None, *, digits: int = 3) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"


def table_cell(text: str) -> str:
    """The text as a cell of a table in Markdown, where a line is a row and a bar ends a cell. It is
    not taken as HTML.
    """
    for sign, written in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("\n", "<br>")):
        text = text.replace(sign, written)
    return text


def duration(seconds: float | None) -> str:
    """`7 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds is None:
        return UNKNOWN
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def unclaimed_words(found: UnclaimedRollouts) -> str:
    """`4 rollouts wait to be claimed, the oldest for 2 min 10 s; the last claim was 3 min 05 s
    ago`.
    """
    if found.number > 1:
        waits = f"{found.number} rollouts wait to be claimed, the oldest"
    else:
        waits = "1 rollout waits to be claimed,"
    if found.claimed_seconds is None:
        last = "no worker has claimed one so far"
    else:
        last = f"the last claim was {duration(found.claimed_seconds)} ago"
    return f"{waits} for {duration(found.seconds)}; {last}"


def size(num_bytes: float) -> str:
    """`512 KB`, `3.4 MB`, `1.2 GB`, in powers of 1024."""
    for unit, factor in (("GB", 2**30), ("MB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 1024:.0f} KB"


def heldout(source: SourceStatus, *, digits: int = 3) -> str:
    """`0.500 → 0.800 (256 tasks)`, with the number of tasks that failed if there were any."""
    scores = number(source.heldout_before, digits=digits)
    if source.was_evaluated_again:
        scores += f" → {number(source.heldout_after, digits=digits)}"
    if not source.failed_before and not source.failed_after:
        return f"{scores} ({source.num_heldout} tasks)"
    first = f"{source.failed_before} and " if source.was_evaluated_again else ""
    mark = ": do not compare" if source.incomplete else ""
    total = source.num_heldout + source.num_failed
    return f"{scores} ({first}{source.num_failed} of {total} tasks failed{mark})"


def busy_words(
    *, engine_busy: float | None, trainer_busy: float | None, slots_used: float | None = None
) -> str:
    """`engines busy 90% (35% of their slots), trainer busy 80%`."""
    slots = "" if slots_used is None else f" ({percent(slots_used)} of their slots)"
    return f"engines busy {percent(engine_busy)}{slots}, trainer busy {percent(trainer_busy)}"
