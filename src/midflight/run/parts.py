"""The parts of a run: the kinds of process, the spec that each gets at its start, and the messages
that it sends to the launcher. It does not import torch.

Specs and messages travel as JSON lines on standard input and output.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec

from midflight.errors import MidflightError
from midflight.observe.status import Status
from midflight.run.heartbeat import Beat, Heartbeat

T = TypeVar("T")

SEATED_VARIABLE: Final = "MIDFLIGHT_SEATED"
"""Set for a part whose parent is not the launcher. Its beats then carry the numbers that the
launcher cannot read itself.
"""
TEACHER: Final = "teacher"
"""The name of the engine process that scores the tokens that others generate."""


class ProcessKind(StrEnum):
    """The kinds of process that a run is made of."""

    ENGINE = "engine"
    WORKER = "worker"
    ROLLOUT = "rollout"
    TRAINER = "trainer"


class Purpose(StrEnum):
    """The purpose of a rollout process."""

    TRAIN = "train"
    """It makes rollouts for our trainer; the launcher ends it."""
    ROLLOUTS = "rollouts"
    """It makes rollouts for a trainer that is not ours; that trainer's `finish` ends it."""
    EVALUATE = "evaluate"
    """It makes the held-out score, and ends."""
    SERVE = "serve"
    """It has no tasks."""


class EngineSpec(msgspec.Struct, frozen=True, tag="engine"):
    """The spec of an engine. `socket_fd` is a listening socket inherited from the launcher: its
    port outlives a restart of the process.
    """

    name: str
    model: str
    config: str
    """The whole configuration, as JSON."""
    socket_fd: int
    token: str
    segment: str
    """The beginning of the names of all memory segments and temporary folders of the run, on every
    machine. No other run has it.
    """
    version: int = 0
    url: str | None = None
    """The URL of a server that runs already; with None one is started."""


class RolloutSpec(msgspec.Struct, frozen=True, tag="rollout"):
    config: str
    model: str
    socket_fd: int
    url: str
    """The address at which the process is reached."""
    token: str
    """The token of the engines."""
    control_token: str
    """The token of the gateway's control plane and of everything under `/midflight/v1`."""
    engines: dict[str, str]
    """The URL of each engine, by name."""
    teacher: str | None = None
    """The URL of the engine that scores and generates nothing, if there is one."""
    worker_token: str | None = None
    """The token of the processes that run agents. Without one agents run in this process."""
    workers: tuple[str, ...] = ()
    """The names of the processes that run agents."""
    purpose: Purpose = Purpose.TRAIN
    version: int = 0
    """The version that the engines start with."""
    checkpoint: int | None = None
    """The version of the checkpoint that the run goes on from; None starts a new run."""
    alarms: tuple[str, ...] = ()
    """Alarms that were raised before this process was started."""
    shard: int = 0
    """The number of this process among `gateway.shards`; `config` is its part."""
    owner: str | None = None
    """The URL of the shard that hands versions over, for one that does not."""
    again: bool = False
    """The process died, and goes on from its store; the rest of the run did not stop."""
    seconds: float = 0.0
    """The time that the run has run when this is sent, over all its starts."""


class WorkerSpec(msgspec.Struct, frozen=True, tag="worker"):
    """The spec of a process that runs agents. It gets no control token: its own token opens nothing
    but the rollouts that it is given.
    """

    name: str
    url: str
    """The URL of the rollout process."""
    token: str
    environment: str
    """The configuration's section `environment`, as JSON."""
    public_url: str = ""
    """`gateway.public_url`."""


class TrainerSpec(msgspec.Struct, frozen=True, tag="trainer"):
    config: str
    rollout_url: str
    token: str
    segment: str
    """The beginning of the names of the files of shared memory; no other run has it."""
    resume: bool = False
    life: int = 0
    """The number of trainers that the rollout process and the engines have outlived. Above 0 this
    one goes on beside them.
    """
    rank: int = 0
    host: str = "127.0.0.1"
    """The address of its machine, at which other parts reach it."""
    meeting: str = ""
    """`host:port` of the first rank, through which several ranks find each other."""
    meeting_fd: int | None = None
    """The first rank's socket at `meeting`, inherited; no other rank has it."""
    further_urls: tuple[str, ...] = ()
    """The URLs of the rollout processes beside the first."""


Spec = EngineSpec | WorkerSpec | RolloutSpec | TrainerSpec


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The part serves; agents reach it at `url`."""

    url: str | None = None


class ModelReady(msgspec.Struct, frozen=True, tag="model_ready"):
    """The trainer has written the model folder that the ring starts from, as version `version`."""

    folder: str
    version: int
    checkpoint: int | None = None
    """The version of the checkpoint that the model is from, on resume. Groups that were trained
    after it wait again.
    """
    alarms: tuple[str, ...] = ()
    """The trainer's alarms until now. The journal lacks them, which the rollout process writes."""


class FirstTokenMade(msgspec.Struct, frozen=True, tag="worked"):
    """An engine has made its first token, or scored its first rows, since it was started. The
    message is sent before the token or the scores.
    """


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    status: Status


class WarmStart(msgspec.Struct, frozen=True, tag="warm_start"):
    """A step of the supervised warm start. `accuracy` is held-out exact match at temperature 1.
    Without a `loss` the step was skipped.
    """

    step: int
    loss: float | None
    accuracy: float | None = None


class Verdict(StrEnum):
    """The consequence of a part's failure for the run."""

    CONFIG = "config"
    """The configuration or the data is to blame. A restart would not help, and the message says
    all.
    """
    FINAL = "final"
    """A budget is spent, or the disk is full. A restart would not help, and the message says all.
    """
    LOST = "lost"
    """The part lost another part, whose own failure explains more."""
    CRASH = "crash"
    """The failure was not foreseen: the traceback is shown, and a restart may help."""
    KILLED = "killed"
    """A server beside the part was killed, by a user or by the kernel for its memory. A restart may
    help, and the server is not to blame.
    """


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last message of a part that failed; the launcher shows it (I9)."""

    error: str
    traceback: str
    verdict: Verdict


class Restarted(msgspec.Struct, frozen=True, tag="restarted"):
    """A message of the launcher itself: a part died and is started again after `seconds`. At
    present this may happen `left` more times; None means without limit.
    """

    part: str
    error: str
    left: int | None
    seconds: float = 0.0


class RestartWorker(msgspec.Struct, frozen=True, tag="condemned"):
    """The rollout process asks the launcher to end a worker and to start it again."""

    part: str
    why: str


class Stalled(msgspec.Struct, frozen=True, tag="stalled"):
    """A message of the launcher itself: something stands still. The report says which part waits
    for which.
    """

    report: str


class Notice(msgspec.Struct, frozen=True, tag="words"):
    """A text for people, such as an answer of the model."""

    text: str


class Alarm(msgspec.Struct, frozen=True, tag="alarm"):
    """Something is wrong that people should look at, though the run goes on. A few lines."""

    text: str


Message = (
    Ready
    | ModelReady
    | FirstTokenMade
    | Progress
    | WarmStart
    | Failed
    | Restarted
    | RestartWorker
    | Stalled
    | Notice
    | Alarm
    | Beat
)

encode = msgspec.json.Encoder().encode
decode_message = msgspec.json.Decoder(Message).decode
decode_spec = msgspec.json.Decoder(Spec).decode


class LauncherPipe:
    """The child's end of the pipe to the launcher. It takes standard output for messages; prints go
    to the log instead.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self.heartbeat = Heartbeat(self.tell)

    def tell(self, message: Message) -> None:
        """Sends a message. A launcher that is gone is no error here: this process ends with it."""
        try:
            with self._lock:
                self._file.write(encode(message) + b"\n")
        except OSError:
            pass


class FirstWork:
    """Tells the launcher once that an engine works."""

    def __init__(self, launcher: LauncherPipe) -> None:
        self._launcher = launcher
        self._is_told = False

    def __call__(self) -> None:
        if not self._is_told:
            self._is_told = True
            self._launcher.tell(FirstTokenMade())


# --- Ends -----------------------------------------------------------------------------------------


class PartLost(MidflightError):
    """Another process of the run did not answer. That process reports why it ended. The ring may
    start again.
    """


class ServerLost(MidflightError):
    """A server beside us ended, or did not come up in time. Started again, it may serve. The
    message has the end of the server's log.
    """

    was_killed = False
    """True if a user or the kernel killed it."""


async def serve_while(main: Coroutine[Any, Any, T], *services: Coroutine[Any, Any, None]) -> T:
    """Runs `services` for as long as `main` runs: only the main part ends a process. A service that
    ends early is no error; one that raises ends `main`.
    """
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(service) for service in services]
        try:
            return await main
        finally:
            for task in running:
                task.cancel()
