"""The figures of a run for people: the same labels and texts in the terminal's table, in the viewer,
in reports and in `midflight compare`.
"""

from collections import Counter
from collections.abc import Iterator

from midflight.observe.failures import most_common
from midflight.observe.readable import busy_words, duration, heldout, percent
from midflight.observe.summary import Summary
from midflight.types import Accounts

DIGEST = "digest"


def figures(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yields label and text of each figure that is known, in the order in which they are shown."""
    yield "time", duration(summary.seconds)
    if summary.training_seconds:
        yield "training phase", duration(summary.training_seconds)
    for name, source in summary.sources.items():
        if source.was_evaluated:
            yield f"held-out {name}", heldout(source)
    yield "weights went live", f"{summary.weight_updates} times"
    share = f" of {summary.rollouts:,}" if summary.rollouts else ""
    yield "rollouts spanning versions", f"{summary.rollouts_spanning_versions:,}{share}"
    yield "failed requests, rollouts", f"{summary.failed_requests}, {summary.failed_rollouts}"
    if summary.failures:
        yield "failed by", most_common(Counter(summary.failures))
    if summary.accounts is not None:
        yield "groups by fate", _groups(summary.accounts)
    yield "tokens trained", f"{summary.trained_tokens:,} of {summary.generated_tokens:,} generated"
    if summary.masked_by:
        fields = (f"{field} {number:,}" for field, number in summary.masked_by.items())
        yield "tokens masked by a field", ", ".join(fields)
    if summary.replaced:
        fields = (f"{field} {number:,}" for field, number in summary.replaced.items())
        yield "requests with the run's sampling", ", ".join(fields)
    yield "oldest trained token", f"{summary.max_token_staleness} versions"
    if summary.overlap_share is not None:
        yield "engine and trainer busy together", percent(summary.overlap_share)
        busy = busy_words(
            engine_busy=summary.engine_busy,
            trainer_busy=summary.trainer_busy,
            slots_used=summary.slots_used,
        )
        yield "who was busy", f"{summary.bound}: {busy}"
    if summary.advice:
        yield "advice", summary.advice
    if summary.idle_times:
        waits = (f"{idle} {percent(idle.share)}" for idle in summary.idle_times)
        yield "waiting", ", ".join(waits)
    if summary.peak_memory_mb is not None:
        yield "peak memory", f"{summary.peak_memory_mb:,.0f} MB"
    if summary.digest:
        yield DIGEST, summary.digest


def _groups(accounts: Accounts) -> str:
    waiting = accounts.running + accounts.waiting + accounts.leased
    dropped = sum(accounts.dropped.values())
    return f"{accounts.trained:,} trained, {waiting:,} not yet, {dropped:,} dropped"
