"""The record that a refactoring is held against: what this checkout does, written into a folder, and compared with an earlier record.

    python tools/record.py DIR                          writes every part into DIR, a JSON file each
    python tools/record.py DIR --against OTHER          also prints each difference from OTHER by name; status 1 if there is any
    python tools/record.py DIR --only curves bodies     these parts alone
    python tools/record.py DIR --junit FILE             takes the tests' results from FILE (pytest's --junit-xml) and runs none

| part | what is recorded | what is a difference |
|---|---|---|
| tests | every test of `make test` and its result | a test that vanished or has another result |
| curves | losses and weights of very short trainings | any bit; only on equal versions of torch and transformers and equal processors |
| bodies | the gateway's answers to recorded requests of clients | anything but ids and times |
| dry-runs | the output of `train --dry-run` of every configuration | anything but what the machine adds (`recording/dry_runs.py`) |
| journey | modules of a streamed chat, calls a token | more calls a token |

What is new in a part is listed and is no difference. Record both sides on one machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from recording import Found
from recording.comparing import changes

PARTS = ("tests", "curves", "bodies", "dry-runs", "journey")
Differences: TypeAlias = Callable[[Found, Found], Iterator[str]]
"""Of an earlier recording and one of now."""


@dataclass(frozen=True)
class Part:
    """A part of the record: what finds its things, and what tells two recordings apart."""

    find: Callable[[], Found]
    differences: Differences = changes


def part_of(name: str, *, junit: Path | None) -> Part:
    """The part of that name. Its module is imported only now, because some import torch."""
    match name:
        case "tests":
            from recording import suite

            return Part(partial(suite.results, junit))
        case "curves":
            from recording import curves

            return Part(curves.curves, curves.differences)
        case "bodies":
            from recording import bodies

            return Part(bodies.answers)
        case "dry-runs":
            from recording import dry_runs

            return Part(dry_runs.dry_runs)
        case _:
            from recording import chat

            return Part(chat.calls, chat.differences)


def write(folder: Path, name: str, found: Found) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file_of(folder, name).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def read(folder: Path, name: str) -> Found:
    return json.loads(file_of(folder, name).read_text())


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def compare(part: Part, before: Found, now: Found) -> int:
    """Prints what is new and each difference; returns the number of differences."""
    for name in now.keys() - before.keys():
        print(f"  new: {name}")
    found = list(part.differences(before, now))
    for difference in found:
        print(f"  DIFFERS {difference}")
    return len(found)


def main() -> int:
    options = parsed()
    num_differences = 0
    for name in options.only:
        part = part_of(name, junit=options.junit)
        found = part.find()
        write(options.folder, name, found)
        print(f"{name}: {len(found)} recorded")
        if options.against is not None:
            num_differences += compare(part, read(options.against, name), found)
    return 1 if num_differences else 0


def parsed() -> argparse.Namespace:
    """The options of the command line. An earlier record must have all parts that are compared, and is not written over."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--against", type=Path, metavar="OTHER")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--junit", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.against is not None:
        if options.against.resolve() == options.folder.resolve():
            parser.error("DIR and OTHER are one folder: the earlier record would be written over.")
        for name in options.only:
            if not file_of(options.against, name).is_file():
                parser.error(
                    f"{options.against} has no record of {name}; choose parts with --only."
                )
    return options


if __name__ == "__main__":
    sys.exit(main())
