"""What a benchmark prints: the machine, tables for a page, and the figures that are kept."""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class Report:
    """Prints tables while they are made, and writes all of it with `--json`.

    A figure is a number that `figures.toml` holds: the ratio of two sides, of which larger is
    better.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._file: Path | None = options.json
        self._found: dict[str, Any] = {"machine": machine(), "tables": [], "figures": {}}
        print(self._found["machine"], flush=True)

    def table(self, *headings: str) -> Table:
        """Begins a table."""
        rows: list[list[str]] = []
        self._found["tables"].append({"headings": headings, "rows": rows})
        return Table(headings, rows)

    def figure(self, name: str, value: float) -> None:
        self._found["figures"][name] = value

    def keep(self, name: str, value: object) -> None:
        """Writes a value that is not printed."""
        self._found[name] = value

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        """Writes the file of `--json`, if there is one."""
        if self._file is not None:
            self._file.write_text(json.dumps(self._found, indent=1) + "\n")


class Table:
    """A Markdown table, printed row by row."""

    def __init__(self, headings: Sequence[str], rows: list[list[str]]) -> None:
        self._width = len(headings)
        self._rows = rows
        print(f"\n| {' | '.join(headings)} |")
        print("|---" * self._width + "|", flush=True)

    def row(self, *cells: object) -> None:
        texts = [str(cell) for cell in cells]
        assert len(texts) == self._width, texts
        self._rows.append(texts)
        print(f"| {' | '.join(texts)} |", flush=True)


def machine() -> str:
    """A line on where this was measured."""
    kinds = (("avx512f", "AVX-512"), ("avx2", "AVX2"))
    flags = _flags()
    vectors = next((name for flag, name in kinds if flag in flags), "neither AVX2 nor AVX-512")
    load = os.getloadavg()[0]
    today = datetime.date.today()
    return f"measured on {today}, {os.cpu_count()} cores, {vectors}, load {load:.1f}"


def _flags() -> set[str]:
    """What the processor can do, by Linux's words."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split())
    return set()


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


Part = Callable[[argparse.Namespace, Report], bool | None]
"""A part of a benchmark. One that has bounds returns whether it kept them."""


def make_parts(options: argparse.Namespace, parts: Mapping[str, Part]) -> None:
    """Measures the parts that `--parts` names, one after the other, into one report. Ends the
    program with status 1 if a part did not keep its bounds, which the smoke form need not.
    """
    report = Report(options)
    kept = [parts[part](options, report) for part in options.parts]
    report.close()
    if False in kept and not options.smoke:
        raise SystemExit(1)
