"""The checks before a run that need the machine and the user's own code. They are a process of their
own.

    python -m midflight.run.launcher.preflight

It imports the environment, draws the tasks, loads the tokenizer, renders a prompt, and looks at
devices, disk, shared memory and ports. It reads objects of the program that starts the run, and a
configuration, from standard input and writes `Findings` to standard output. It changes nothing.
Importing this needs no torch; a run of it may.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from midflight import given
from midflight.config import derived
from midflight.config.agent import SINGLE_TURN, agent_of, entries_of
from midflight.config.disk import disk_bytes, spilled_bytes, staged_bytes
from midflight.config.formulas import OBJECTIVES
from midflight.config.model_checks import check_tokenizer
from midflight.config.seats import device_map
from midflight.config.sections import Config
from midflight.config.sources import DATASET_SIZE, source_names
from midflight.errors import ConfigError, MidflightError
from midflight.observe.readable import duration, size
from midflight.run.launcher.drawing_time import DrawingTime, TakesLonger, with_few
from midflight.run.launcher.folder import num_bytes_of_run
from midflight.run.launcher.survey import LOOKING_SECONDS, SourceFindings, Survey
from midflight.run.launcher.trial import trying
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.trajectories.pairs import check_local, store_path
from midflight.weights.transports.memory_files import SHARED, shared_free
from midflight.wire.server import listen

if TYPE_CHECKING:
    from midflight.environments.agent_program import AgentProgram
    from midflight.environments.sources import Source

T = TypeVar("T")


class SamplePrompt(msgspec.Struct, frozen=True):
    """The text of a task as the model reads it, and its tokens with their ids."""

    source: str
    task: str
    text: str
    tokens: tuple[tuple[int, str], ...]


class Findings(msgspec.Struct, frozen=True):
    """The result of all checks."""

    problems: tuple[str, ...] = ()
    """Each refuses the run."""
    notes: tuple[str, ...] = ()
    prompt: SamplePrompt | None = None
    own_loss: str | None = None
    """The description of the user's own loss."""
    sources: tuple[SourceFindings, ...] = ()


class Inspection:
    """Looks at one configuration. Every problem is found, not only the first."""

    def __init__(self, config: Config, *, doing: Callable[[str], None] = lambda _: None) -> None:
        """`doing` receives each next action, as a verb with its object."""
        self._config = config
        self._doing = doing
        self._problems: list[str] = []
        self._notes: list[str] = []

    def findings(self) -> Findings:
        config = self._config
        program = self._tried(self._environment)
        sources = self._tried(self._sources)
        if program is not None and sources:
            first_tasks = [source.training[0] for source in sources if source.training]
            self._tried(lambda: program.check_columns(first_tasks))
        tokenizer = self._tried(self._tokenizer)
        prompt = None
        found = None
        if sources and tokenizer is not None:
            prompt = self._tried(lambda: self._prompt(sources[0], tokenizer))
            measured = prompt is not None
            found = self._tried(lambda: self._survey(sources, tokenizer, measured=measured))
        if config.warm_start.data is not None and tokenizer is not None:
            self._tried(lambda: self._conversations(tokenizer))
        if config.model.path is not None:
            self._tried(self._architecture)
        own_loss = None if config.objective.kind in OBJECTIVES else self._tried(self._own_loss)
        self._tried(self._trackers)
        machine = self.machine()
        return msgspec.structs.replace(
            machine, prompt=prompt, own_loss=own_loss, sources=tuple(found or ())
        )

    def machine(self) -> Findings:
        """Looks at the machine alone, and returns everything that was found until now."""
        self._doing("looks at the machine")
        self._tried(self._disk)
        if self._config.cluster.kind == "local":
            self._tried(self._devices)
            self._tried(self._shared_memory)
            self._tried(self._port)
        return Findings(tuple(self._problems), tuple(self._notes))

    def _tried(self, look: Callable[[], T]) -> T | None:
        try:
            return look()
        except MidflightError as error:
            self._problems.append(str(error))
            return None

    # --- What the run is made of ------------------------------------------------------------------

    def _environment(self) -> AgentProgram:
        from midflight.environments.agent_program import AgentProgram
        from midflight.environments.mcp_servers import check_servers

        entries = ", ".join(entries_of(self._config.environment))
        self._doing(f"imports {entries or agent_of(self._config.environment)}")
        program = AgentProgram(self._config.environment)
        if self._config.environment.mcp:
            self._doing("starts the servers of environment.mcp")
            asyncio.run(check_servers(self._config.environment.mcp))
        return program

    def _sources(self) -> Sequence[Source] | None:
        """Loads all tasks of the sources, or a few of those of datasets if drawing all takes too
        long here.
        """
        from midflight.environments.sources import load_sources

        sections = self._config.environment.sources
        seed = self._config.run.seed
        self._doing("opens the sources of tasks")
        drawing = DrawingTime(sections, say=self._doing)
        try:
            return load_sources(sections, seed=seed, on_entry=drawing.drawn)
        except TakesLonger:
            pass
        wanted = ", ".join(
            f"{s.dataset}: size = {s.size or DATASET_SIZE}, heldout = {s.num_heldout}"
            for s in sections
            if s.dataset
        )
        self._notes.append(
            f"drawing the tasks ({wanted}) takes about {duration(drawing.whole_seconds)} of "
            "processor time at every start; lower size and heldout for less. Whether there are so "
            "many is not checked."
        )
        return load_sources([with_few(section) for section in sections], seed=seed)

    def _tokenizer(self) -> Tokenizer:
        self._doing("loads the tokenizer")
        path = self._config.model.path
        if path is not None:
            return check_tokenizer(path)
        with tempfile.TemporaryDirectory(prefix="midflight-") as folder:
            write_byte_tokenizer(Path(folder))
            return Tokenizer.load(Path(folder))

    def _prompt(self, source: Source, tokenizer: Tokenizer) -> SamplePrompt | None:
        """Returns the first task's prompt, as the plainest environment and a warm start send it."""
        config = self._config
        task = source.training[0]
        try:
            text = tokenizer.render(task.messages, add_generation_prompt=True)
        except MidflightError as error:
            if agent_of(config.environment) != SINGLE_TURN and not config.warm_start.is_made:
                self._notes.append(f"chats cannot be sent to this model: {error}")
                return None
            raise
        ids = tokenizer.encode(text)
        if len(ids) >= config.model.max_context:
            raise ConfigError(
                f"the prompt of task {task.id} of {source.name} has {len(ids)} tokens and "
                f"model.max_context is {config.model.max_context}, which leaves none for an "
                "answer; raise it, or choose shorter tasks."
            )
        tokens = tuple((i, tokenizer.backend.id_to_token(i) or "?") for i in ids)
        return SamplePrompt(source.name, task.id, text, tokens)

    def _survey(
        self, sources: Sequence[Source], tokenizer: Tokenizer, *, measured: bool
    ) -> list[SourceFindings]:
        """Looks at every row, and at the lengths of prompts if the model takes chats."""
        config = self._config
        environment = config.environment
        learns_answers = config.warm_start.is_made and config.warm_start.data is None
        compares_answers = agent_of(environment) == SINGLE_TURN and not environment.rewards
        survey = Survey(
            needs_answer=compares_answers or learns_answers, max_context=config.model.max_context
        )
        names = source_names(environment.sources)
        sections = dict(zip(names, environment.sources, strict=True))
        for source in sources:
            self._doing(f"looks at the tasks of {source.name}")
            survey.rows(source, sections[source.name])
        found: list[SourceFindings] = []
        if measured:
            found = [survey.lengths(source, tokenizer) for source in sources]
        self._notes += survey.notes
        return found

    def _conversations(self, tokenizer: Tokenizer) -> None:
        from midflight.run.trainer.conversations import Conversations

        assert self._config.warm_start.data is not None
        self._doing("looks at warm_start.data")
        conversations = Conversations(
            self._config.warm_start.data, tokenizer, max_tokens=self._config.model.max_context
        )
        looked = conversations.check(seconds=LOOKING_SECONDS)
        if looked < len(conversations):
            self._notes.append(
                f"of warm_start.data the first {looked:,} of {len(conversations):,} conversations "
                f"were looked at in {LOOKING_SECONDS:.0f} s of processor time: a broken one behind "
                "them ends the run when it is learnt."
            )

    def _architecture(self) -> None:
        from midflight.models.load import check_folder
        from midflight.models.sizes import num_experts_of

        config = self._config
        assert config.model.path is not None
        self._doing("looks at the model")
        check_folder(config.model.path)
        number = 0 if config.lora.rank is None else num_experts_of(config.model.path)
        if number:
            self._notes.append(
                f"[lora] does not reach the {number} experts of each layer, nor their router: they "
                "stay as they are, and adapters train the linear layers beside them, attention "
                "first of all. Without [lora] everything is trained."
            )

    def _own_loss(self) -> str:
        from midflight.trainer.own_loss import described

        self._doing(f"imports {self._config.objective.kind}")
        return described(self._config)

    def _trackers(self) -> None:
        for name in self._config.observe.trackers:
            if ":" in name:
                from midflight.trackers.tracker import make_tracker

                self._doing(f"imports {name}")
                make_tracker(name)

    # --- What the machine has ---------------------------------------------------------------------

    def _devices(self) -> None:
        config = self._config
        wanted = {"trainer.device": config.trainer.device}
        if not config.engine.urls:
            wanted["engine.device"] = config.engine.device
        if not any(device.startswith("cuda") for device in wanted.values()):
            return
        self._doing("asks torch for GPUs")
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for key, device in wanted.items():
            if device.startswith("cuda") and not count:
                self._problems.append(
                    f"{key} is {device!r}, which this machine has not got; set it to cpu: torch "
                    "sees no GPU."
                )
        if count:
            device_map(config, number=count)

    def _disk(self) -> None:
        folder = Path(self._config.run.folder).absolute()
        there = next(place for place in (folder, *folder.parents) if place.is_dir())
        if not os.access(there, os.W_OK):
            raise ConfigError(
                f"run.folder is {folder}, and {there} cannot be written to; choose another "
                "run.folder, or make it writable."
            )
        check_local(store_path(folder, self._config.run.store_folder))
        sizes = derived.model_sizes(self._config.model)
        versions = spilled_bytes(self._config, sizes, shared_free=shared_free())
        needed = disk_bytes(self._config, sizes) + versions
        free = shutil.disk_usage(there).free + num_bytes_of_run(folder)
        if free < needed:
            spilled = ""
            if versions:
                spilled = (
                    f", {size(versions)} of it for versions on their way, for which {SHARED} has "
                    "no room (in containers --shm-size)"
                )
            raise ConfigError(
                f"run.folder is {folder}, where {size(free)} are free, and checkpoints and models "
                f"take {size(needed)}{spilled}; free some space, choose another run.folder, or "
                "lower trainer.keep_checkpoints."
            )

    def _shared_memory(self) -> None:
        needed = staged_bytes(self._config, derived.model_sizes(self._config.model))
        if not needed or not SHARED.is_dir():
            return
        free = shared_free()
        if free < needed:
            raise ConfigError(
                f"{SHARED} has {size(free)} free, and the folders that servers load versions from "
                f"take {size(needed)} there; enlarge it (in containers --shm-size)."
            )

    def _port(self) -> None:
        listen(self._config.gateway.host, self._config.gateway.port).close()


def main() -> None:
    with trying() as trial:
        given.read(sys.stdin.buffer)
        config = Config.model_validate_json(sys.stdin.read())
        inspection = Inspection(config, doing=trial.doing)
        trial.answer(msgspec.json.encode(inspection.findings()))


if __name__ == "__main__":
    main()
    os._exit(0)  # threads of the user's modules are not waited for
