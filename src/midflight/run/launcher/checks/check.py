"""The types of a check before a run: its input, its findings, and its row in the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from midflight import given
from midflight.config.gpus import DescribedGpus
from midflight.config.sections import Config
from midflight.run.parts import Purpose

if TYPE_CHECKING:
    from midflight.environments.agent_program import AgentProgram
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


ok = partial(Finding, Severity.OK)
warning = partial(Finding, Severity.WARNING)
error = partial(Finding, Severity.ERROR)


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
        return tuple(one.sentence for one in self.found if one.severity is severity)


# --- What a check is told -------------------------------------------------------------------------


class Caller(StrEnum):
    """The callers of the checks. The first three ask about a run on this machine."""

    START = "start"
    DRY_RUN = "dry run"
    DOCTOR = "doctor"
    PLAN = "plan"
    """A dry run for GPUs that options describe. They are elsewhere, so that nothing is asked of
    this machine.
    """


class About(StrEnum):
    """The thing that a check looks at. `midflight doctor` may be asked about some alone."""

    MACHINE = "machine"
    ROOM = "room"
    """The room and the devices that a run finds on the machine."""
    MODEL = "model"
    RUN = "run"
    """The configuration, with its tasks and its code."""


class TorchFound(msgspec.Struct, frozen=True):
    """The version of torch, that of CUDA if it is built for it, and the name and the memory in bytes
    of each GPU that it sees.
    """

    torch: str
    cuda: str | None
    devices: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class Loaded:
    """Objects that checks have loaded for the checks after them. A check that fails loads nothing."""

    torch: TorchFound | None = None
    program: AgentProgram | None = None
    sources: Sequence[Source] = ()
    tokenizer: Tokenizer | None = None
    prompt: SamplePrompt | None = None
    survey: list[SourceFindings] = field(default_factory=list[SourceFindings])
    own_loss: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The run that would begin, and the caller who asks about it."""

    config: Config
    caller: Caller = Caller.START
    purpose: Purpose = Purpose.TRAIN
    about: frozenset[About] = frozenset(About)
    resume: bool = False
    overwrite: bool = False
    objects: bytes = given.NOTHING
    """The objects that a Python program gives to its run, packed."""
    doing: Callable[[str], None] = lambda _: None
    """Receives each next action, as a verb with its object."""
    loaded: Loaded = field(default_factory=Loaded)
    gpus: DescribedGpus | None = None
    """The GPUs that the options of a dry run describe."""

    @property
    def trains(self) -> bool:
        """True if our trainer is a part of the run."""
        return self.purpose is Purpose.TRAIN

    @property
    def folder(self) -> Path:
        return Path(self.config.run.folder)


# --- A row of the table ---------------------------------------------------------------------------

EVERYBODY = frozenset(Caller) - {Caller.PLAN}
"""All who ask about this machine."""
ANYWHERE = frozenset(Caller)
"""These and a plan: the check looks at no machine, and at no more of a model than its configuration
and its tokenizer.
"""
TASKS = frozenset({Purpose.TRAIN, Purpose.ROLLOUTS})
"""Commands that draw tasks, publish versions and keep a run in a folder."""


@dataclass(frozen=True, slots=True)
class Check:
    """A row of the table. `look` yields findings, or raises an error, which is a finding for each of
    its lines.

    A check that may refuse a run here is asked by all three callers who ask about this machine, so
    that none of them says that a run is sound which another refuses. What doctor alone asks refuses
    nothing. The dry run alone asks for `proofs`, because trainer and engine find the same when they
    load the model. Where no GPU is asked for, it does not try the import of torch.
    """

    look: Callable[[Plan], Iterable[Finding] | None]
    about: About
    purposes: frozenset[Purpose] = TASKS
    callers: frozenset[Caller] = EVERYBODY

    @property
    def name(self) -> str:
        return self.look.__name__.replace("_", " ")
