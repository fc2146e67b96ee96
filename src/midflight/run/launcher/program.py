"""The Python program that starts a run, where that is not our command line."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from midflight import given
from midflight.observe.summary import Summary
from midflight.run.launcher.ending import Stop
from midflight.run.parts import Message


def ignore_message(message: Message) -> None:
    """Hears a message for a program that does not listen."""
    del message


@dataclass(slots=True)
class Program:
    """What it gives to its run, and how it hears of it."""

    objects: bytes = given.NOTHING
    """What the run's processes get of it, packed."""
    rows: Path | None = None
    """A file of what it gives as data. The run's folder gets a copy."""
    console: Console | None = None
    """The console on which the run is shown. None is standard output."""
    stop: Stop = field(default_factory=Stop)
    hear: Callable[[Message], None] = ignore_message
    """Hears everything that the parts say, in the launcher's thread. Must not raise or wait."""
    summary: Summary | None = None
    """How the run went, once it has ended."""
