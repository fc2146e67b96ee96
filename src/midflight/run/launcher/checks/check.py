"""A check before a run: what it is told, what it finds, and who asks it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from midflight import given
from midflight.config.sections import Config
from midflight.run.parts import Purpose

if TYPE_CHECKING:
    from midflight.environments.registry import AgentProgram
    from midflight.environments.sources import Source
    from midflight.text.tokenizer import Tokenizer


# --- What a check finds ---------------------------------------------------------------------------


class Severity(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "note"
    """Something that a run may meet, and can do without."""
    ERROR = "problem"
    """A run could not work."""


class Finding(msgspec.Struct, frozen=True):
    """One result of a check. The remedy is empty where `found` says it."""

    severity: Severity
    what: str
    found: str
    remedy: str = ""

    @property
    def sentence(self) -> str:
        """The finding as one text, for a command that shows no table."""
        return f"{self.what}: {self.found}; {self.remedy}" if self.remedy else self.found


class SamplePrompt(msgspec.Struct, frozen=True):
    """The text of a task as the model reads it, and its tokens with their ids."""

    source: str
    task: str
    text: str
    tokens: tuple[tuple[int, str], ...]


class SourceFindings(msgspec.Struct, frozen=True):
    """The content of a source in numbers. `lengths` are quantiles of the lengths in tokens of the
    `num_measured` prompts that were tokenised.
    """

    name: str
    num_training: int
    num_heldout: int
    num_left_out: int
    num_measured: int = 0
    lengths: tuple[int, ...] = ()
    num_too_long: int = 0
    """The measured prompts that are so long that no token is left for an answer."""


class TorchFound(msgspec.Struct, frozen=True):
    """The version of torch, that of CUDA if it is built for it, and the name and the memory in bytes
    of each GPU that it sees.
    """

    torch: str
    cuda: str | None
    devices: tuple[tuple[str, int], ...]


class Findings(msgspec.Struct, frozen=True):
    """The results of all checks, and what they have read on the way."""

    found: tuple[Finding, ...] = ()
    prompt: SamplePrompt | None = None
    own_loss: str | None = None
    """The description of the user's own loss."""
    sources: tuple[SourceFindings, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """A sentence for each error."""
        return self._said(Severity.ERROR)

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each warning."""
        return self._said(Severity.WARNING)

    def _said(self, severity: Severity) -> tuple[str, ...]:
        said = [one.sentence for one in self.found if one.severity is severity]
        return tuple(dict.fromkeys(said))


# --- What a check is told -------------------------------------------------------------------------


class Caller(StrEnum):
    """The three callers of the checks."""

    START = "start"
    DRY_RUN = "dry run"
    DOCTOR = "doctor"


EVERYBODY = frozenset(Caller)


class About(StrEnum):
    """The thing that a check looks at. `midflight doctor` may be asked about some alone."""

    MACHINE = "machine"
    """This machine, with the defaults if there is no configuration."""
    MODEL = "model"
    """The folder of a model."""
    RUN = "run"
    """A configuration, with its tasks and its code."""


@dataclass(slots=True)
class Loaded:
    """What checks have loaded for the checks after them; nothing where one has failed."""

    torch: TorchFound | None = None
    program: AgentProgram | None = None
    sources: Sequence[Source] = ()
    tokenizer: Tokenizer | None = None
    prompt: SamplePrompt | None = None
    survey: tuple[SourceFindings, ...] = ()
    own_loss: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What would begin, and who asks."""

    config: Config
    elsewhere: Config | None = None
    """The configuration for the checks of model, tasks and code, if it is another: a program's rows
    lie elsewhere before there is a folder, and `midflight doctor` may be asked about a model alone.
    """
    caller: Caller = Caller.START
    about: frozenset[About] = frozenset(About)
    purpose: Purpose = Purpose.TRAIN
    resume: bool = False
    overwrite: bool = False
    gives_rows: bool = False
    """True if a program brings the rows that the folder gets."""
    objects: bytes = given.NOTHING
    """The objects that a Python program gives to its run, packed."""
    doing: Callable[[str], None] = lambda _: None
    """Receives each next action, as a verb with its object."""
    loaded: Loaded = field(default_factory=Loaded)

    @property
    def tried(self) -> Config:
        """The configuration for the checks of model, tasks and code."""
        return self.elsewhere or self.config

    @property
    def trains(self) -> bool:
        """True if our trainer is a part of the run."""
        return self.purpose is Purpose.TRAIN

    @property
    def folder(self) -> Path:
        return Path(self.config.run.folder)


# --- A row of the table ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """A row of the table. `look` yields findings, or raises an error, which is a finding for each of
    its lines.

    A check that may refuse a run is asked by all three callers, so that none of them says that a
    run is sound which another refuses. One that only informs may be asked by some. `proofs` is
    asked by the dry run alone, because trainer and engine find the same when they load the model.
    """

    name: str
    look: Callable[[Plan], Iterable[Finding] | None]
    about: About
    callers: frozenset[Caller] = EVERYBODY
    purposes: frozenset[Purpose] = frozenset(Purpose)
    in_trial: bool = False
    """True if it needs the user's code or torch, which the process of a command does without."""
    informs: bool = False
    """True if it refuses nothing: an error that it raises is a warning."""
