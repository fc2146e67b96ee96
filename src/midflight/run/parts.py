"""The parts of a run: which there are, what each is told at its start and tells the launcher, and
how a part ends. Torch-free.

What is told travels as JSON lines on standard input and output. `endpoint.json` in a run's folder
says where the run is reached and by which token, for programs of the same user.
"""

import asyncio
import os
import secrets
import threading
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from midflight.errors import ConfigError, MidflightError
from midflight.observe.progress import Status
from midflight.run.heart import Beat, Heart

T = TypeVar("T")

SEATED_VARIABLE: Final = "MIDFLIGHT_SEATED"
"""Set for a part that the launcher is not the parent of: it tells in its beats what the launcher
cannot see.
"""
TEACHER: Final = "teacher"
"""Name of the engine process that scores what others generate."""


class ProcessKind(StrEnum):
    """The kinds of process a run is made of."""

    ENGINE = "engine"
    WORKER = "worker"
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
    """`socket_fd` is a listening socket inherited from the launcher: its port outlives a restart of
    the process.
    """

    name: str
    model: str
    config: str
    """The whole configuration, as JSON."""
    socket_fd: int
    token: str
    segment: str
    """Begins the names of what the run keeps in memory and in temporary folders, on whichever
    machine; no other run has it.
    """
    version: int = 0
    url: str | None = None
    """Of a server that runs already; none starts one."""


class RolloutSpec(msgspec.Struct, frozen=True, tag="rollout"):
    config: str
    model: str
    socket_fd: int
    url: str
    """Where it is reached."""
    token: str
    """Of the engines."""
    control_token: str
    """Of the gateway's control plane and of everything under `/midflight/v1`."""
    engines: dict[str, str]
    """URL by engine name."""
    teacher: str | None = None
    """URL of the engine that scores and generates nothing, where there is one."""
    worker_token: str | None = None
    """Of the processes that run agents; without one they run in this process."""
    workers: tuple[str, ...] = ()
    """Their names."""
    purpose: Purpose = Purpose.TRAIN
    version: int = 0
    """The version that the engines start with."""
    checkpoint: int | None = None
    """Version of the checkpoint that the run goes on from; none starts a new one."""
    alarms: tuple[str, ...] = ()
    """That were told before this process was there."""
    shard: int = 0
    """Which of `gateway.shards`; `config` is its part."""
    owner: str | None = None
    """Of a shard that hands no versions over: URL of the one that does."""
    again: bool = False
    """It died, and goes on from its store, while the rest of the run went on."""


class WorkerSpec(msgspec.Struct, frozen=True, tag="worker"):
    """Of a process that runs agents. It gets no control token: its own opens nothing but rollouts
    that it is given.
    """

    name: str
    url: str
    """Of the rollout process."""
    token: str
    environment: str
    """The section of the configuration, as JSON."""
    public_url: str = ""
    """`gateway.public_url`."""


class TrainerSpec(msgspec.Struct, frozen=True, tag="trainer"):
    config: str
    rollout_url: str
    token: str
    segment: str
    """Begins the names of the files of shared memory; no other run has it."""
    resume: bool = False
    life: int = 0
    """Above 0 it goes on beside a rollout process and engines that have outlived so many
    trainers.
    """
    rank: int = 0
    host: str = "127.0.0.1"
    """Address of its machine, at which other parts reach it."""
    meeting: str = ""
    """`host:port` of the first rank, where several find each other."""
    meeting_fd: int | None = None
    """The first rank's socket there, inherited; no other rank has it."""
    further_urls: tuple[str, ...] = ()
    """Of the rollout processes beside the first."""


Spec = EngineSpec | WorkerSpec | RolloutSpec | TrainerSpec


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The part serves; `url` is where agents reach it."""

    url: str | None = None


class ModelReady(msgspec.Struct, frozen=True, tag="model_ready"):
    """The trainer has written the model folder that the ring starts from, as version `version`."""

    folder: str
    version: int
    checkpoint: int | None = None
    """On resume: the version of the checkpoint behind it. What was trained above it goes back to
    waiting.
    """
    alarms: tuple[str, ...] = ()
    """That the trainer has told; the journal, which the rollout process writes, lacks them."""


class Worked(msgspec.Struct, frozen=True, tag="worked"):
    """An engine has made its first token, or scored its first rows, since it was started. Told
    before anybody gets them.
    """


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    status: Status


class WarmStart(msgspec.Struct, frozen=True, tag="warm_start"):
    """How the supervised warm start stands; `accuracy` is held-out exact match at temperature 1; no
    `loss`: the step was skipped.
    """

    step: int
    loss: float | None
    accuracy: float | None = None


class Verdict(StrEnum):
    """What the failure of a part means for the run."""

    CONFIG = "config"
    """The configuration or the data is to blame: a restart would not help, and the message says
    all.
    """
    FINAL = "final"
    """A budget is spent, or the disk is full: the same."""
    LOST = "lost"
    """The part lost another part, whose own failure says more."""
    CRASH = "crash"
    """Nobody foresaw it: the traceback is shown, and a restart may help."""
    KILLED = "killed"
    """Somebody has killed a server beside it, or the kernel has for its memory: a restart may help,
    and the server is not to blame.
    """


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last message of a part that failed: what the launcher shows (I9)."""

    error: str
    traceback: str
    verdict: Verdict


class Restarted(msgspec.Struct, frozen=True, tag="restarted"):
    """The launcher's own: a part died and is started again after `seconds`, which may happen `left`
    more times for now, without a limit where that is None."""

    part: str
    error: str
    left: int | None
    seconds: float = 0.0


class Condemned(msgspec.Struct, frozen=True, tag="condemned"):
    """The rollout process asks for a worker to be ended and started again."""

    part: str
    why: str


class Stalled(msgspec.Struct, frozen=True, tag="stalled"):
    """The launcher's own: something stands still. The report says who waits for whom."""

    report: str


class Words(msgspec.Struct, frozen=True, tag="words"):
    """Something for people to read, such as what the model wrote."""

    text: str


class Alarm(msgspec.Struct, frozen=True, tag="alarm"):
    """Something is wrong that people should look at, though the run goes on. A few lines."""

    text: str


Message = (
    Ready
    | ModelReady
    | Worked
    | Progress
    | WarmStart
    | Failed
    | Restarted
    | Condemned
    | Stalled
    | Words
    | Alarm
    | Beat
)

encode = msgspec.json.Encoder().encode
decode_message = msgspec.json.Decoder(Message).decode
decode_spec = msgspec.json.Decoder(Spec).decode


class Launcher:
    """The child's end of the pipe to the launcher. Takes standard output for messages; prints go to
    the log instead.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self.heart = Heart(self.tell)

    def tell(self, message: Message) -> None:
        """Sends a message; a launcher that is gone is no error here: this process ends with it
        anyway.
        """
        try:
            with self._lock:
                self._file.write(encode(message) + b"\n")
        except OSError:
            pass


class FirstWork:
    """Tells the launcher once that an engine works."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._is_told = False

    def __call__(self) -> None:
        if not self._is_told:
            self._is_told = True
            self._launcher.tell(Worked())


# --- Ends -----------------------------------------------------------------------------------------


class PartLost(MidflightError):
    """Another process of the run did not answer. Why it ended is its own to say; the ring may start
    again.
    """


class ServerLost(MidflightError):
    """A server beside us ended, or did not come up in time: started again, it may serve. Its
    message has the end of its log.
    """

    was_killed = False
    """By somebody, or by the kernel."""


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


# --- Where a run is reached -----------------------------------------------------------------------


NAME = "endpoint.json"
MIN_TOKEN_LENGTH = 16
MAX_TOKEN_LENGTH = 512
TOKEN_VARIABLE = "MIDFLIGHT_CONTROL_TOKEN"
"""Kept from children: what an agent inherits, it could score itself with."""


class Endpoint(msgspec.Struct, frozen=True):
    """Its repr would hold the token: never print one."""

    url: str
    control_token: str
    run: str
    model_path: str
    """Folder of the weights that the run began with."""
    api_version: int = 1

    def __repr__(self) -> str:
        return f"<Endpoint of {self.run} at {self.url}>"


def write_endpoint(folder: Path, endpoint: Endpoint) -> None:
    """Readable by this user alone, from its first byte on; whole or not at all."""
    draft = folder / f".{NAME}.writing"
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123 (the mode is given here)
        file.write(msgspec.json.encode(endpoint))
    draft.replace(folder / NAME)


def remove_endpoint(folder: Path, control_token: str) -> None:
    """When the run ends: nobody listens there any more. One that another run has written there
    since stays.
    """
    with suppress(OSError, msgspec.DecodeError):
        written = msgspec.json.decode((folder / NAME).read_bytes(), type=Endpoint)
        if secrets.compare_digest(written.control_token.encode(), control_token.encode()):
            (folder / NAME).unlink()


@dataclass(frozen=True, slots=True)
class ControlToken:
    """`is_new`: drawn here, so that somebody must be told it, once."""

    value: str = field(repr=False)
    is_new: bool


def control_token(given: str | None) -> ControlToken:
    """The one given, else that of the environment, else a new one."""
    chosen = given or os.environ.get(TOKEN_VARIABLE)
    return (
        ControlToken(secrets.token_urlsafe(24), True)
        if chosen is None
        else ControlToken(_checked(chosen), False)
    )


def _checked(token: str) -> str:
    """`ConfigError` when it could not travel in a header, or could be guessed."""
    if (
        not MIN_TOKEN_LENGTH <= len(token) <= MAX_TOKEN_LENGTH
        or not token.isascii()
        or not token.isprintable()
        or " " in token
    ):
        raise ConfigError(
            f"the control token has {len(token)} characters: give {MIN_TOKEN_LENGTH} to "
            f"{MAX_TOKEN_LENGTH} printable ones of ASCII, without spaces."
        )
    return token
