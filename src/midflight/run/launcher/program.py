"""The Python program that starts a run, if that is not our command line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from midflight import given
from midflight.observe.summary import Summary
from midflight.run.launcher.shutdown import Shutdown
from midflight.run.parts import Message


def ignore_message(message: Message) -> None:
    """Ignores a message, for a program that does not listen."""
    del message


@dataclass(slots=True)
class Program:
    """A Python program's objects and data for its run, and its ways to follow and stop the run."""

    objects: bytes = given.NOTHING
    """The objects that the run's processes receive from it, packed."""
    rows: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Files with the program's data, by the names of the copies that the run's folder gets."""
    console: Console | None = None
    """The console on which the run is shown. None is standard output."""
    stop: Shutdown = field(default_factory=Shutdown)
    hear: Callable[[Message], None] = ignore_message
    """Receives every message of the parts, in the launcher's thread. Must not raise or wait."""
    summary: Summary | None = None
    """The run's summary, once it has ended."""
