"""The table at the end of `midflight train`: the contents of `summary.json`, for people."""

from collections import Counter

from rich import box
from rich.table import Table
from rich.text import Text

from midflight.observe.failures import most_common
from midflight.observe.readable import busy_words, duration, heldout, percent
from midflight.observe.status import Status
from midflight.observe.summary import Summary
from midflight.observe.terminal import learning
from midflight.types import Accounts


def summary_table(summary: Summary, status: Status) -> Table:
    """The table of a summary. `status` is the one that the summary was made from."""
    table = Table(
        title=f"{summary.name}: {summary.steps} steps in {duration(summary.seconds)}",
        box=box.ROUNDED,
        show_header=False,
    )
    table.add_column(style="bold")
    table.add_column()
    for source in status.sources:
        table.add_row(
            f"held-out {source.name}",
            heldout(source),
            style="yellow" if source.is_incomplete else "",
        )
    share = f" of {summary.rollouts:,}" if summary.rollouts else ""
    table.add_row("weights went live", f"{summary.weight_updates} times")
    table.add_row("rollouts spanning versions", f"{summary.rollouts_spanning_versions:,}{share}")
    table.add_row(
        "failed requests, rollouts", f"{summary.failed_requests}, {summary.failed_rollouts}"
    )
    if summary.failures:
        table.add_row("failed by", most_common(Counter(summary.failures)), style="yellow")
    if summary.accounts is not None:
        table.add_row("groups", _groups(summary.accounts))
    table.add_row(
        "tokens trained", f"{summary.trained_tokens:,} of {summary.generated_tokens:,} generated"
    )
    for label, text in learning(status):
        table.add_row(label, text)
    table.add_row("oldest trained token", f"{summary.max_token_staleness} versions")
    table.add_row("engine and trainer busy together", percent(summary.overlap_share))
    busy = busy_words(
        engine_busy=summary.engine_busy,
        trainer_busy=summary.trainer_busy,
        slots_used=summary.slots_used,
    )
    table.add_row("who was busy", f"{busy}: {summary.bound}")
    if summary.advice:
        table.add_row("advice", summary.advice)
    table.add_row("peak memory", f"{summary.peak_memory_mb:,.0f} MB")
    for label, lines in (("loss", summary.loss), ("notes", summary.notes)):
        if lines:
            table.add_row(label, Text("\n".join(lines)))  # its brackets are no markup
    return table


def _groups(accounts: Accounts) -> str:
    waiting = accounts.running + accounts.waiting + accounts.leased
    dropped = sum(accounts.dropped.values())
    return f"{accounts.trained:,} trained, {waiting:,} not yet, {dropped:,} dropped"
