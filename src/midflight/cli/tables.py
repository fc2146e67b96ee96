"""The form of the tables of a dry run."""

from rich import box
from rich.table import Table


def new_table(title: str, *columns: str) -> Table:
    """A table without rows. Without columns it has two that have no heading."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_header=bool(columns),
        pad_edge=False,
    )
    for column in columns or ("", ""):
        table.add_column(column, overflow="fold")
    return table
