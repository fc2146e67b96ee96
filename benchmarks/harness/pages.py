"""Tables and pictures that a benchmark puts into the pages of docs/."""

from __future__ import annotations

import statistics
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.rounds import standard_error


def replace_between(page: Path, name: str, text: str) -> None:
    """Replaces what stands in the page between the two comments of that name."""
    begin = f"<!-- {name}: begin -->"
    end = f"<!-- {name}: end -->"
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(
            f"{page} has no pair of {begin} and {end} for the table to go between; put them back."
        )
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for row in rows:
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def mean_and_error(values: Sequence[float], digits: int) -> str:
    """The mean, and where there are several values its standard error."""
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {standard_error(values):.{digits}f}"


@contextmanager
def panels(path: Path, number: int, *, size: tuple[float, float]) -> Generator[list[Any]]:
    """So many axes beside each other, which are written to an SVG at the end. The same content
    gives the same file.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": path.stem, "svg.fonttype": "none", "font.family": "sans-serif"}
    )
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, number, figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    yield list(axes[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def style(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left")
    axes.grid(axis="y", color="#e3e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
