"""A run from Python: in a script, in a thread, or in a notebook.

    trainer = Trainer(
        "models/small",
        rows,
        prompt="{question}",
        rewards=[correct],
        steps=200,
        folder="runs/mine",
    )
    summary = trainer.train()

Agents, engines and the trainer itself run in processes of their own, as with `midflight train`.
The program only watches them.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from midflight.cli import configurations
from midflight.cli.put_back import put_back_at
from midflight.errors import ConfigError
from midflight.models.gguf_folders import model_folder
from midflight.observe.lines import CheckpointLine, EvaluationLine, Line, StepLine
from midflight.observe.metrics import metrics_of
from midflight.observe.status import Status
from midflight.observe.summary import Summary
from midflight.python.arguments import Arguments, Tables, Weighted
from midflight.python.background import BackgroundRun
from midflight.python.callbacks import Callbacks
from midflight.python.run_folder import JournalLines, RolloutRecord, rollouts_of
from midflight.run.launcher import launch
from midflight.run.launcher.checks.check import Plan
from midflight.run.launcher.program import Program
from midflight.run.launcher.shutdown import LOOK_SECONDS
from midflight.run.parts import Message, Progress


def console(*, shown: bool) -> Console:
    """The console on which a run is shown. It writes lines of text, which may come from any thread:
    a notebook's own way of showing things belongs to the thread of a cell.
    """
    return Console(file=sys.stdout, force_jupyter=False, quiet=not shown, soft_wrap=True)


class Trainer:
    """One run and its folder. `train` may be called again, which starts the run a second time:
    `resume` goes on with it, and `overwrite` replaces it.

    model: a Hugging Face model folder, or a GGUF file; none makes a small model, as `config` says.
    data: a list of dicts, a Dataset, a path, an iterator, a function that returns one, or
        `module:function`.
    prompt, answer, system, heldout, shuffle: as in `[[environment.sources]]`. `heldout` may also
        be rows, like `data`.
    rewards: functions, or pairs of one with its weight.
    tools: functions.
    environment: a function or class in place of both.
    config: a TOML file, or a dict of its sections. The other arguments override it.
    progress: whether the run is shown.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        data: Any = None,
        *,
        prompt: str | None = None,
        answer: str | None = None,
        system: str | None = None,
        heldout: Any = None,
        shuffle: bool | None = None,
        rewards: Weighted = (),
        tools: Sequence[object] = (),
        environment: object = None,
        steps: int | None = None,
        folder: str | Path | None = None,
        config: str | Path | Tables | None = None,
        resume: bool = False,
        overwrite: bool = False,
        progress: bool = True,
        on_step: Callable[[StepLine], object] | None = None,
        on_evaluation: Callable[[EvaluationLine], object] | None = None,
        on_checkpoint: Callable[[CheckpointLine], object] | None = None,
        on_end: Callable[[Summary], object] | None = None,
    ) -> None:
        """Raises `ConfigError` with all faults of the arguments. Nothing is started, and only a
        temporary file of the rows is written.
        """
        source = {
            "prompt": prompt,
            "answer": answer,
            "system": system,
            "heldout": heldout,
            "shuffle": shuffle,
        }
        given = {name: value for name, value in source.items() if value is not None}
        self._asked = Arguments(
            model, data, given, rewards, tools, environment, steps, folder, config
        ).asked()
        self.config = self._asked.config
        self.folder = Path(self.config.run.folder)
        self._resume = resume
        self._overwrite = overwrite
        self._progress = progress
        self._callbacks = Callbacks(on_step, on_evaluation, on_checkpoint, on_end)
        self._under_way: BackgroundRun | None = None
        self._lines = JournalLines(self.folder / "metrics.jsonl")
        self._listener: threading.Thread | None = None
        self._failure: BaseException | None = None
        """The error of a callback, if one has raised."""

    # --- Starting and ending ----------------------------------------------------------------------

    def train(self, *, resume: bool | None = None, overwrite: bool | None = None) -> Summary:
        """Trains to the end. Callbacks run in this thread.

        Ctrl-C, or the interruption of a cell, ends the run in order and then raises
        `KeyboardInterrupt`; `resume=True` goes on from there.
        """
        self._begin(resume, overwrite)
        return self._waited()

    def start(self, *, resume: bool | None = None, overwrite: bool | None = None) -> Trainer:
        """Trains while this program goes on; `wait` gives the summary. Callbacks run in a thread of
        their own.
        """
        self._begin(resume, overwrite)
        self._listener = threading.Thread(
            target=self._follow, name="midflight callbacks", daemon=True
        )
        self._listener.start()
        return self

    def wait(self) -> Summary:
        """Waits until the run that was started is over. Raises the error that ended it."""
        self._started()
        return self._waited()

    def stop(self) -> None:
        """Ends the run in order, with everything written; `resume=True` goes on from there. Does
        not wait: `wait` does.
        """
        self._started().stop()

    @property
    def running(self) -> bool:
        return self._under_way is not None and not self._under_way.over

    @property
    def status(self) -> Status:
        """The status that the terminal shows."""
        if self._under_way is None:
            return Status(name=self.config.run.name, steps=self.config.run.steps)
        return self._under_way.status

    def _started(self) -> BackgroundRun:
        if self._under_way is None:
            raise ConfigError("this trainer was not started; call train() or start().")
        return self._under_way

    def _begin(self, resume: bool | None, overwrite: bool | None) -> None:
        """Starts the run. Everything that can be checked is checked before the folder is
        touched.
        """
        if self.running:
            raise ConfigError(
                f"{self.folder} is in use by this trainer, which trains already; call stop() and "
                "wait() first."
            )
        resume = self._resume if resume is None else resume
        overwrite = self._overwrite if overwrite is None else overwrite
        shown = console(shown=self._progress)
        plan = Plan(
            self._asked.tried,
            resume=resume,
            overwrite=overwrite,
            objects=self._asked.objects,
        )
        with _in_words_of_python():
            found = configurations.checked(plan, meanwhile=lambda: launch.begin(self.config, shown))
        program = Program(self._asked.objects, self._asked.files, shown)
        self._under_way = BackgroundRun(
            self.config, program, resume=resume, overwrite=overwrite, found=found
        )
        self._lines = self._under_way.lines(since_start=True)
        self._listener = None
        self._failure = None
        self._under_way.begin()

    def _follow(self) -> None:
        """Waits for lines, and passes them to the callbacks; ended by the run. A callback that
        raises ends the run, and no callback is called after that.
        """
        under_way = self._started()
        while True:
            over = under_way.over
            for line in under_way.wait(self._lines):
                self._call(partial(self._callbacks.hear, line))
            if over:
                break
        on_end = self._callbacks.on_end
        if under_way.summary is not None and on_end is not None:
            self._call(partial(on_end, under_way.summary))

    def _call(self, callback: Callable[[], object]) -> None:
        if self._failure is None:
            try:
                callback()
            except Exception as error:
                self._failure = error
                self._started().stop()

    def _waited(self) -> Summary:
        """Waits for the run's end; ended by it. An interruption stops the run."""
        under_way = self._started()
        asked = list[signal.Signals]()

        def ask(number: signal.Signals) -> None:
            asked.append(number)
            under_way.stop(number)

        with _signals(ask):
            going_on = True
            while going_on:
                try:
                    if self._listener is None:
                        self._follow()
                        going_on = False
                    else:
                        self._listener.join(LOOK_SECONDS)
                        going_on = self._listener.is_alive()
                except KeyboardInterrupt:
                    ask(signal.SIGINT)
        with _in_words_of_python():
            under_way.check()
        if self._failure is not None:
            raise self._failure
        if asked and asked[0] is signal.SIGINT:
            raise KeyboardInterrupt
        if asked:
            raise SystemExit(128 + asked[0])
        assert under_way.summary is not None
        return under_way.summary

    # --- Looking at it, while it runs and afterwards ----------------------------------------------

    def metrics(self) -> Iterator[StepLine]:
        """Yields the steps so far, then each as it is made, until the run is over. If this trainer
        was not started, it yields the steps in the folder. docs/metrics.md has the keys.
        """
        if self._under_way is None:
            put_back_at(self.folder)
            yield from _steps(JournalLines(self.folder / "metrics.jsonl").new())
            return
        under_way = self._under_way
        lines = under_way.lines()
        over = False
        while not over:
            over = under_way.over
            yield from _steps(under_way.wait(lines))

    def frame(self) -> Any:
        """A `pandas.DataFrame` of the steps so far, a row each, by the names for dashboards in
        docs/metrics.md. Needs `pip install 'midflight[pandas]'`.
        """
        try:
            import pandas
        except ImportError as error:
            raise ConfigError(
                "a frame is one of pandas, which is not installed; pip install 'midflight[pandas]'."
            ) from error
        if not self.running:
            put_back_at(self.folder)
        read = frozenset[int]() if self._under_way is None else self._under_way.before
        rows = [
            {
                "step": line.step,
                "version": line.version,
                "seconds": line.seconds,
                **metrics_of(line),
            }
            for line in _steps(JournalLines(self.folder / "metrics.jsonl", read=read).new())
        ]
        return pandas.DataFrame(rows).set_index("step") if rows else pandas.DataFrame()

    def rollouts(self) -> Iterator[RolloutRecord]:
        """Yields every rollout that has ended, in the order of the tasks, with its conversation and
        its reward.
        """
        if not self.running:
            put_back_at(self.folder)
        return rollouts_of(self.folder)

    def evaluate(self, model: str | Path | None = None) -> Mapping[str, float | None]:
        """Returns the mean reward on the held-out tasks of each source. By default the model is the
        trained one, or, before there is one, the model that training begins with.
        """
        if not self.running:
            put_back_at(self.folder)
        trained = self.folder / "model"
        if model is not None:
            chosen = model_folder(Path(model))
        elif trained.is_dir():
            chosen = trained
        else:
            chosen = self.config.model.path
        if chosen is None:
            raise ConfigError(
                f"{self.folder} has no model yet, and none was given to begin with; train first, "
                "or evaluate(model)."
            )
        asked = self._asked.tried
        own = asked.run.model_copy(update={"folder": self.folder / "evaluation"})
        found = self.status

        def hear(message: Message) -> None:
            nonlocal found
            if isinstance(message, Progress):
                found = message.status

        program = Program(self._asked.objects, console=console(shown=self._progress), hear=hear)
        launch.evaluate(asked.model_copy(update={"run": own}), chosen, program=program)
        return {source.name: source.heldout_before for source in found.sources}


def _steps(lines: Sequence[Line]) -> Iterator[StepLine]:
    return (line for line in lines if isinstance(line, StepLine))


@contextmanager
def _signals(ask: Callable[[signal.Signals], None]) -> Generator[None]:
    """Has SIGTERM and SIGHUP end the run in order, if they reach this thread, which they do if it
    is a script's main one. SIGINT is a `KeyboardInterrupt` anyhow.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: ask(signal.Signals(number)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _in_words_of_python() -> Generator[None]:
    """Puts arguments in place of the options that errors of the command line name."""
    try:
        yield
    except ConfigError as error:
        said = str(error)
        for option, argument in WORDS.items():
            said = said.replace(option, argument)
        raise ConfigError(said) from error


WORDS = {
    "--folder (--set run.folder=)": "folder=",
    "--folder": "folder=",
    "--resume": "resume=True",
    "--overwrite": "overwrite=True",
}
