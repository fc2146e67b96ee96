"""What the commands do: `train`, `rollouts`, `serve`, `engine`, `evaluate`, `new_model`. Each
returns an exit status.

The launcher never imports torch; whatever computes does so in a child process.
"""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from midflight import given
from midflight.config import derived
from midflight.config.sections import Config
from midflight.config.sources import source_names
from midflight.errors import ConfigError, disk_full
from midflight.observe.memory import PeakMemory
from midflight.observe.plot import drawn_by_itself
from midflight.observe.status import Phase, Status, WarmStartStatus, heldout
from midflight.observe.summary import (
    Said,
    Summary,
    past_seconds,
    summarise,
    summary_table,
    write_summary,
)
from midflight.observe.terminal import Terminal
from midflight.run.launcher import opening
from midflight.run.launcher.aside import is_aside
from midflight.run.launcher.budgets import Budgets
from midflight.run.launcher.ending import Stop, main_task
from midflight.run.launcher.folder import CONFIG, ROWS, can_go_on, clear, kept, prepare, set_aside
from midflight.run.launcher.holding import held
from midflight.run.launcher.replacing import ReplacedRun
from midflight.run.launcher.ring import WRITING_SECONDS, Ring
from midflight.run.launcher.starting import check_kept
from midflight.run.launcher.tracking import ENDING_SECONDS, Tracking
from midflight.run.launcher.viewing import BesideRun
from midflight.run.parts import (
    Alarm,
    ControlToken,
    Message,
    ModelReady,
    Progress,
    Purpose,
    Ready,
    Restarted,
    Stalled,
    WarmStart,
    Words,
    control_token,
    serve_while,
)
from midflight.run.places.port import HasDescriptor, PartFailed
from midflight.types import Version
from midflight.wire.hosts import exposure, is_loopback

MEMORY_SECONDS = 1.0
"""Between two looks at the memory of all processes; a look costs some milliseconds of one core."""


def unheard(message: Message) -> None:
    """Whoever started the run does not listen."""
    del message


@dataclass(slots=True)
class Program:
    """The Python program that starts a run, where that is not our command line."""

    objects: bytes = given.NOTHING
    """What it gives to the run's processes, packed."""
    rows: Path | None = None
    """A file of what it gives as data, which the run's folder gets a copy of."""
    console: Console | None = None
    """Where the run is shown; none is standard output."""
    stop: Stop = field(default_factory=Stop)
    hear: Callable[[Message], None] = unheard
    """Hears everything that the parts say, in the launcher's thread. Must not raise or wait."""
    summary: Summary | None = None
    """How the run went, once it has ended."""


class Run:
    """A training run, from the launcher: what it shows, measures and leaves behind."""

    def __init__(
        self,
        config: Config,
        terminal: Terminal,
        token: ControlToken,
        lock: HasDescriptor,
        *,
        loss: Sequence[str] = (),
        program: Program | None = None,
    ) -> None:
        """`loss`: the lines that say which is taken, where it is ours."""
        self._program = program or Program()
        self._config = config
        self._terminal = terminal
        self._token = token
        self._lock = lock
        self._loss = loss
        self._folder = Path(config.run.folder)
        self._began = time.monotonic()
        self._before = 0.0
        self._newest: Ring | None = None
        self._memory = PeakMemory(
            os.getpid(), elsewhere=lambda: sum(self._newest.memory.values()) if self._newest else 0
        )
        self._viewer = BesideRun(config, token=token.value, say=terminal.say)
        self._tracking = Tracking(config, terminal.say)
        self._replaced = ReplacedRun(self._folder, terminal.say)
        self.status = Status(name=config.run.name, steps=config.run.steps)

    @property
    def seconds(self) -> float:
        """Since the command began, however many processes have come and gone."""
        return time.monotonic() - self._began

    async def train(self, *, resume: bool) -> None:
        """Goes on from an earlier start with `resume`. Restarts the ring from its last checkpoint
        when a part dies that the ring cannot start again by itself, within the budget. Ended by the
        last step, or an error.
        """
        self._before = past_seconds(self._folder) if resume else 0.0
        await serve_while(self._attempts(resume=resume), self._watch_memory(), self._viewer.run())

    async def roll_out(self, model: ModelReady, hear: Callable[[Message], None]) -> None:
        """Rollouts for a trainer that is not ours. Ended by its `finish`, or by the death of a
        part: the weights are the trainer's.
        """
        await serve_while(
            self._ring(hear, model).run(Purpose.ROLLOUTS), self._watch_memory(), self._viewer.run()
        )

    def _ring(
        self,
        hear: Callable[[Message], None],
        model: ModelReady | None = None,
        *,
        budgets: Budgets | None = None,
    ) -> Ring:
        def told(message: Message) -> None:
            hear(message)
            self._program.hear(message)

        token = self._token.value
        objects = self._program.objects
        self._newest = Ring(
            self._config,
            on_message=told,
            control_token=token,
            lock=self._lock,
            model=model,
            budgets=budgets,
            objects=objects,
        )
        return self._newest

    async def _attempts(self, *, resume: bool) -> None:
        budgets = Budgets(self._config.run.restarts)
        while True:
            try:
                return await self._ring(self.hear, budgets=budgets).run(
                    Purpose.TRAIN, resume=resume
                )
            except (BaseExceptionGroup, PartFailed) as failures:
                # alone: of a place that was lost before anything ran there
                again = budgets.spend_on(failures, now=time.monotonic())
            resume = can_go_on(self._folder)
            where = "its last checkpoint" if resume else "the beginning"
            self._terminal.say(
                f"{again.error}\nThe run goes on from {where}{after(again.seconds)}; {again.left} "
                "restarts are left."
            )
            await asyncio.sleep(again.seconds)
            if not resume:
                self._tracking.drop()
                clear(self._folder)

    def hear(self, message: Message) -> None:
        """A word from a part. Synchronous; drawing takes milliseconds."""
        match message:
            case Progress(status):
                self.status = status
                if status.step:
                    self._replaced.look()
                # only now is a resumed run's journal without the steps that are lost
                self._tracking.start()
                self._tracking.hear()
            case WarmStart(step, loss, accuracy):
                section = self._config.warm_start
                before = self.status.warm_start
                shown = accuracy if accuracy is not None else (before.accuracy if before else None)
                warm = WarmStartStatus(
                    step, section.max_steps, loss, shown, section.target_accuracy
                )
                self.status = Status(
                    name=self._config.run.name,
                    phase=Phase.WARM_START,
                    steps=self._config.run.steps,
                    warm_start=warm,
                )
            case Ready(url) if url is not None:
                self._terminal.say(where_gateway(url, self._folder))
                return
            case _:
                if (said := sentence(message)) is not None:
                    self._terminal.say(said)
                return
        self.status = replace(
            self.status, seconds=self._before + self.seconds, start_seconds=self.seconds
        )
        self._terminal.show(self.status)

    async def _watch_memory(self) -> None:
        """Waits for the interval to pass, for ever; ended by its task group."""
        while True:
            self._memory.sample()
            await asyncio.sleep(MEMORY_SECONDS)

    def conclude(self, *, finished: bool) -> Summary:
        """Writes summary and plot of what there is, also after an interruption or a failure, which
        wait less for the plot.
        """
        began = time.monotonic()
        primary = source_names(self._config.environment.sources)[0]
        said = Said(tuple(self._loss), opening.remarks(self._config))
        summary = summarise(
            self.status,
            primary=primary,
            seconds=self.seconds,
            before=self._before,
            peak_memory_mb=self._memory.peak_mb,
            said=said,
        )
        try:
            write_summary(summary, self._folder / "summary.json")
        except OSError as error:  # must not hide why the run ended
            self._terminal.say(f"the summary could not be written: {disk_full(error) or error}")
        if self.status.step:
            seconds = self._config.run.stall_seconds if finished else WRITING_SECONDS
            missing = drawn_by_itself(
                self._folder, title=self._config.run.name, seconds=seconds, patient=finished
            )
            if missing is not None:
                self._terminal.say(missing)
        self._tracking.end(
            seconds=ENDING_SECONDS
            if finished
            else max(0.5, WRITING_SECONDS - (time.monotonic() - began))
        )
        self._replaced.look()
        if finished:
            self._replaced.wait()
        return summary


def as_json(config: Config) -> bool:
    return config.observe.log_format == "json"


def sentence(message: Message) -> str | None:
    """What a message says to whoever looks at the terminal, and none where it says nothing or is
    drawn.
    """
    match message:
        case Restarted(part, error, left, seconds):
            remaining = "" if left is None else f"; {left} restarts are left"
            return f"{error}\n{part} is started again{after(seconds)}{remaining}."
        case Stalled(report):
            return f"stall: {report}"
        case Alarm(text):
            return f"alarm: {text}"
        case Words(text):
            return text
        case _:
            return None


def where_gateway(url: str, folder: Path) -> str:
    return f"gateway: {url}, with its token in {folder / 'endpoint.json'}"


def after(seconds: float) -> str:
    return f" in {seconds:.0f} s" if seconds else ""


def begin(config: Config, console: Console | None = None) -> None:
    """The first lines of `train` and `rollouts`, which they do not repeat: said while the
    configuration is tried, which takes seconds.
    """
    Terminal(console, as_json=as_json(config)).say(opening.beginning(config))


def _begin_in(folder: Path, config: Config, *, resume: bool, say: Callable[[str], None]) -> None:
    """Makes the folder ready. A run that is there, and that `check_kept` lets this one replace,
    stays aside until this one's first step.
    """
    if not resume and (found := kept(folder)) is not None:
        set_aside(folder, config)
        say(
            f"{folder} holds {found}, which is deleted after the first step of this one; if this "
            "one ends before that, it is put back."
        )
    prepare(folder, config, resume=resume)


def train(
    config: Config,
    *,
    resume: bool = False,
    overwrite: bool = False,
    own_loss: str | None = None,
    program: Program | None = None,
) -> int:
    """Ctrl-C ends it within five seconds, with everything written and nothing left running;
    `--resume` goes on from there.

    In any thread, and in a notebook. `own_loss`: what a loss of the user's own says of itself.
    """
    program = program or Program()
    folder = Path(config.run.folder)
    token = control_token(None)
    with (
        Terminal(program.console, as_json=as_json(config)) as terminal,
        held(folder, terminal.say) as lock,
    ):
        # again: while it was not held, somebody else may have used it
        check_kept(config, resume=resume, overwrite=overwrite, gives_rows=program.rows is not None)
        _begin_in(folder, config, resume=resume, say=terminal.say)
        if program.rows is not None:
            shutil.copyfile(program.rows, folder / ROWS)
        terminal.say(opening.training(config, own_loss=own_loss))
        run = Run(
            config,
            terminal,
            token,
            lock,
            loss=opening.loss_lines(config, own_loss),
            program=program,
        )
        warn(terminal, config, anonymous=False)
        status = 1
        try:
            status = main_task(run.train(resume=resume), stop=program.stop)
        finally:
            summary = program.summary = run.conclude(finished=status == 0)
        terminal.say(summary_table(summary, run.status))
        if not is_aside(folder):
            made = [
                name
                for name in ("summary.json", "metrics.jsonl", "plot.png", "model/", "adapter/")
                if (folder / name).exists()
            ]
            terminal.say(f"{folder}: {', '.join(made)}")
    return status


def rollouts(config: Config, *, overwrite: bool = False, token: str | None) -> int:
    """Engines, gateway and rollouts for a trainer that somebody else brings, until it has finished,
    or until Ctrl-C.
    """
    if config.environment.sampling.truncates_the_policy and not derived.trains_truncated(
        config, trainer_is_ours=False
    ):
        raise ConfigError(
            "environment.top_p, top_k and min_p leave nothing to train for a trainer that does "
            "not read `kept`. Set correction.sampling_masks = true if yours does, or remove them."
        )
    if config.engine.lend:
        raise ConfigError(
            "engine.lend lends what our trainer computes on, and here another trains. Remove it, "
            "or raise engine.count."
        )
    model = _model(
        config.model.path,
        (
            "set model.path to a Hugging Face model folder; `midflight new-model DIR` makes one to "
            "try "
            "with"
        ),
    )
    chosen = control_token(token)
    folder = Path(config.run.folder)
    with Terminal(as_json=as_json(config)) as terminal, held(folder, terminal.say) as lock:
        check_kept(config, resume=False, overwrite=overwrite, trains=False)
        _begin_in(folder, config, resume=False, say=terminal.say)
        terminal.say(opening.rolling_out(config))
        run = Run(config, terminal, chosen, lock)
        warn(terminal, config, anonymous=False)

        def hear(message: Message) -> None:
            if isinstance(message, Ready) and message.url is not None:
                announce(terminal, message.url, chosen)
            run.hear(message)

        status = 1
        try:
            status = main_task(run.roll_out(model, hear))
        finally:
            summary = run.conclude(finished=status == 0)
        terminal.say(summary_table(summary, run.status))
    return status


def announce(terminal: Terminal, address: str, token: ControlToken) -> None:
    """The address; and the token, where nobody knows it yet."""
    terminal.say(f"ready: {address}")
    if token.is_new:
        terminal.say(f"control token: {token.value}")


def warn(terminal: Terminal, config: Config, *, anonymous: bool) -> None:
    # where its loopback would be nobody else's
    host = config.gateway.host
    is_elsewhere = config.cluster.kind != "local"
    if (
        warning := exposure(
            "the gateway's machine" if is_elsewhere and is_loopback(host) else host,
            anonymous=anonymous,
        )
    ) is not None:
        terminal.say(warning)


def serve(config: Config, *, token: str | None) -> int:
    """Engines and gateway, until Ctrl-C."""
    model = _model(config.model.path)
    chosen = control_token(token)
    with (
        Terminal(as_json=as_json(config)) as terminal,
        held(Path(config.run.folder), terminal.say) as lock,
    ):
        terminal.say(opening.serving(config))
        warn(terminal, config, anonymous=True)

        def hear(message: Message) -> None:
            if isinstance(message, Ready) and message.url is not None:
                announce(terminal, f"{message.url}/v1", chosen)
            elif (said := sentence(message)) is not None:
                terminal.say(said)

        return main_task(
            Ring(config, on_message=hear, control_token=chosen.value, lock=lock, model=model).run(
                Purpose.SERVE
            )
        )


def evaluate(config: Config, model: Path, *, program: Program | None = None) -> int:
    """The held-out score of a model folder, by the same environment, seeds and engine as in
    training. `program` hears it too.
    """
    program = program or Program()
    with (
        Terminal(program.console, as_json=as_json(config)) as terminal,
        held(Path(config.run.folder), terminal.say) as lock,
    ):
        terminal.say(
            opening.evaluating(
                config.model_copy(update={"model": config.model.model_copy(update={"path": model})})
            )
        )
        last = Status()

        def hear(message: Message) -> None:
            nonlocal last
            program.hear(message)
            if isinstance(message, Progress):
                last = message.status
                terminal.show(last)
            elif isinstance(message, Ready) and message.url is not None:
                # workers outside claim the rollouts
                terminal.say(where_gateway(message.url, Path(config.run.folder)))
            elif (said := sentence(message)) is not None:
                terminal.say(said)

        token = control_token(None).value
        objects = program.objects
        ring = Ring(
            config,
            on_message=hear,
            control_token=token,
            lock=lock,
            model=_model(model),
            objects=objects,
        )
        status = main_task(ring.run(Purpose.EVALUATE), stop=program.stop)
        for source in last.sources:
            terminal.say(f"{source.name}: {heldout(source, digits=4)}")
    return status


def _model(
    folder: Path | None, remedy: str = "pass --model DIR, a Hugging Face model folder"
) -> ModelReady:
    if folder is None:
        raise ConfigError(f"no model was given: {remedy}.")
    return ModelReady(str(folder.resolve()), 0)


def engine(config: Config, *, host: str, port: int, token: str | None) -> int:
    """One engine, in this process, until Ctrl-C. Reachable from other machines it has a token, on
    loopback only if one is given.
    """
    from midflight.run.launcher.one_engine import serve_engine

    assert config.model.path is not None
    chosen = control_token(token)
    guard = None if chosen.is_new and is_loopback(host) else chosen
    with Terminal(as_json=as_json(config)) as terminal:
        terminal.say(opening.serving(config, logs=False))

        def ready(url: str) -> None:
            terminal.say(f"ready: {url}")
            if guard is not None and guard.is_new:
                terminal.say(f"control token: {guard.value}")

        given = None if guard is None else guard.value

        def alarmed(text: str) -> None:
            terminal.say(f"alarm: {text}")

        return main_task(
            serve_engine(
                config,
                config.model.path,
                host=host,
                port=port,
                token=given,
                ready=ready,
                alarmed=alarmed,
            )
        )


def rollback(config: Config, *, to: Version) -> int:
    """Goes back to an older checkpoint of the run in the configuration's folder; `train --resume`
    goes on from there.
    """
    from midflight.run.trainer.rollback import roll_back

    folder = Path(config.run.folder)
    with Terminal() as terminal, held(folder, terminal.say):
        groups = roll_back(folder, to, run=config.run.name, store_folder=config.run.store_folder)
        terminal.say(
            f"{folder} is back at version {to}: {groups} groups of tasks that were trained since "
            "then wait again. Go on by:"
        )
        terminal.say(f"midflight train {folder / CONFIG} --resume")
    return 0


def new_model(config: Config, folder: Path) -> int:
    from midflight.run.trainer.trainer_process import first_model

    first_model(config.model.model_copy(update={"path": None}), folder, seed=config.run.seed)
    return 0
