"""The table at the end of `midflight train`: the figures of its summary."""

from rich import box
from rich.table import Table
from rich.text import Text

from midflight.observe.figures import DIGEST, figures
from midflight.observe.status import Status
from midflight.observe.summary import Summary
from midflight.observe.terminal import learning


def summary_table(summary: Summary, status: Status) -> Table:
    """The table of a summary. `status` is the one that the summary was made from."""
    table = Table(
        title=f"{summary.name}: {summary.steps} steps", box=box.ROUNDED, show_header=False
    )
    table.add_column(style="bold")
    table.add_column()
    troubles = {"failed by"}
    for name, source in summary.sources.items():
        if source.incomplete:
            troubles.add(f"held-out {name}")
    for label, text in figures(summary):
        if label != DIGEST:  # the command prints it below, on one line
            table.add_row(label, Text(text), style="yellow" if label in troubles else "")
    for label, text in learning(status):
        table.add_row(label, text)
    for label, lines in (("loss", summary.loss), ("notes", summary.notes)):
        if lines:
            table.add_row(label, Text("\n".join(lines)))  # its brackets are no markup
    return table
