"""The parts of a run: which there are, what each is told at its start and tells the launcher, and how a part ends. Torch-free.

What is told travels as JSON lines on standard input and output.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec

from midflight.errors import MidflightError
from midflight.observe.progress import Status

T = TypeVar("T")

TEACHER: Final = "teacher"
"""Name of the engine process that scores what others generate."""


class ProcessKind(StrEnum):
    """The kinds of process a run is made of."""

    ENGINE = "engine"
    ROLLOUT = "rollout"
    TRAINER = "trainer"


class Purpose(StrEnum):
    """What a rollout process is there for."""

    TRAIN = "train"
    """Rollouts for our trainer; ended by the launcher."""
    ROLLOUTS = "rollouts"
    """Rollouts for a trainer that is not ours; ended by its `finish`."""
    EVALUATE = "evaluate"
    """Held-out score, then the end."""
    SERVE = "serve"
    """No tasks."""


class EngineSpec(msgspec.Struct, frozen=True, tag="engine"):
    """`socket_fd` is a listening socket inherited from the launcher: its port outlives a restart of the process."""

    name: str
    model: str
    config: str
    """The whole configuration, as JSON."""
    socket_fd: int
    token: str
    staging: str
    """Folder of this engine's own, for versions on their way into a server of other people."""
    version: int = 0
    url: str | None = None
    """Of a server that runs already; none starts one."""


class RolloutSpec(msgspec.Struct, frozen=True, tag="rollout"):
    config: str
    model: str
    socket_fd: int
    port: int
    token: str
    """Of the engines."""
    control_token: str
    """Of the gateway's control plane and of everything under `/midflight/v1`."""
    engines: dict[str, str]
    """URL by engine name."""
    teacher: str | None = None
    """URL of the engine that scores and generates nothing, where there is one."""
    purpose: Purpose = Purpose.TRAIN
    version: int = 0
    """The version that the engines start with."""
    checkpoint: int | None = None
    """Version of the checkpoint that the run goes on from; none starts a new one."""


class TrainerSpec(msgspec.Struct, frozen=True, tag="trainer"):
    config: str
    rollout_url: str
    token: str
    segment: str
    """Begins the names of the files of shared memory; no other run has it."""
    resume: bool = False
    rank: int = 0
    meeting: str = ""
    """The file through which several ranks find each other; no other attempt has it."""


Spec = EngineSpec | RolloutSpec | TrainerSpec


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The part serves; `url` is where agents reach it."""

    url: str | None = None


class ModelReady(msgspec.Struct, frozen=True, tag="model_ready"):
    """The trainer has written the model folder that the ring starts from, as version `version`."""

    folder: str
    version: int
    checkpoint: int | None = None
    """On resume: the version of the checkpoint behind it. What was trained above it goes back to waiting."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    status: Status


class WarmStart(msgspec.Struct, frozen=True, tag="warm_start"):
    """How the supervised warm start stands; `accuracy` is held-out exact match at temperature 1; no `loss`: the step was skipped."""

    step: int
    loss: float | None
    accuracy: float | None = None


class Verdict(StrEnum):
    """What the failure of a part means for the run."""

    CONFIG = "config"
    """The configuration or the data is to blame: a restart would not help, and the message says all."""
    FINAL = "final"
    """A budget is spent, or the disk is full: the same."""
    LOST = "lost"
    """The part lost another part, whose own failure says more."""
    CRASH = "crash"
    """Nobody foresaw it: the traceback is shown, and a restart may help."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last message of a part that failed: what the launcher shows (I9)."""

    error: str
    traceback: str
    verdict: Verdict


class Restarted(msgspec.Struct, frozen=True, tag="restarted"):
    """The launcher's own: a part died and is started again, which may happen `left` more times."""

    part: str
    error: str
    left: int


class Alarm(msgspec.Struct, frozen=True, tag="alarm"):
    """Readings of the step that made `version` say that training is off its distribution, and those of the step before did not."""

    version: int
    sentences: tuple[str, ...]


Message = Ready | ModelReady | Progress | WarmStart | Failed | Restarted | Alarm

encode = msgspec.json.Encoder().encode
decode_message = msgspec.json.Decoder(Message).decode
decode_spec = msgspec.json.Decoder(Spec).decode


class Launcher:
    """The child's end of the pipe to the launcher. Takes standard output for messages; prints go to the log instead."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def tell(self, message: Message) -> None:
        """Sends a message; a launcher that is gone is no error here: this process ends with it anyway."""
        try:
            with self._lock:
                self._file.write(encode(message) + b"\n")
        except OSError:
            pass


# --- Ends ------------------------------------------------------------------------------------------------------------


class PartLost(MidflightError):
    """Another process of the run did not answer. Why it ended is its own to say; the ring may start again."""


class ServerLost(MidflightError):
    """A server beside us ended, or did not come up in time: started again, it may serve. Its message has the end of its log."""


async def serve_while(main: Coroutine[Any, Any, T], *services: Coroutine[Any, Any, None]) -> T:
    """Runs `services` for as long as `main` runs: only the main part ends a process. A service that ends early is no error; one that raises ends `main`."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(service) for service in services]
        try:
            return await main
        finally:
            for task in running:
                task.cancel()
