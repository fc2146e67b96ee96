"""A run in all its attempts, from its first message to its summary."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from midflight.config.sections import Config
from midflight.config.sources import source_names
from midflight.errors import disk_full
from midflight.observe.memory import PeakMemory
from midflight.observe.plot import draw_in_process
from midflight.observe.status import Phase, Status, WarmStartStatus
from midflight.observe.summary import (
    StartNotes,
    Summary,
    past_seconds,
    summarise,
    write_summary,
)
from midflight.observe.terminal import Terminal
from midflight.run.endpoint import ControlToken
from midflight.run.launcher import opening
from midflight.run.launcher.folder import can_go_on, clear
from midflight.run.launcher.program import Program
from midflight.run.launcher.replaced_run import ReplacedRun
from midflight.run.launcher.restarts import RestartBudgets
from midflight.run.launcher.ring import WRITING_SECONDS, Ring
from midflight.run.launcher.sentences import after, sentence, where_gateway
from midflight.run.launcher.tracker_process import ENDING_SECONDS, TrackerProcess
from midflight.run.launcher.viewer import RunViewer
from midflight.run.parts import (
    Message,
    ModelReady,
    Progress,
    Purpose,
    Ready,
    Restarted,
    WarmStart,
    serve_while,
)
from midflight.run.places.port import HasDescriptor

MEMORY_SECONDS = 1.0
"""The time between two looks at the memory of all processes. A look costs some milliseconds of one
core.
"""


class Run:
    """Shows a run, measures it, and writes its records."""

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
        """`loss` are the lines that name the loss, if the trainer is ours."""
        self._program = program or Program()
        self._config = config
        self._terminal = terminal
        self._token = token
        self._lock = lock
        self._loss = loss
        self._folder = Path(config.run.folder)
        self._began = time.monotonic()
        self._before = 0.0
        """Seconds of the run before this command."""
        self._newest: Ring | None = None
        self._memory = PeakMemory(os.getpid(), elsewhere=self._bytes_elsewhere)
        self._viewer = RunViewer(config, token=token.value, say=terminal.say)
        self._trackers = TrackerProcess(config, terminal.say)
        self._replaced = ReplacedRun(self._folder, terminal.say)
        self.status = Status(name=config.run.name, steps=config.run.steps)

    @property
    def seconds(self) -> float:
        """The time since the command began, however many processes have come and gone."""
        return time.monotonic() - self._began

    def _bytes_elsewhere(self) -> int:
        """The memory of processes that this one cannot look at."""
        if self._newest is None:
            return 0
        return sum(self._newest.children.memory.values())

    async def train(self, *, resume: bool) -> None:
        """Trains until the last step, or an error. With `resume` it goes on from an earlier start.

        When a part dies that the ring cannot start again by itself, the ring begins again from its
        last checkpoint, within the budget.
        """
        self._before = past_seconds(self._folder) if resume else 0.0
        await serve_while(self._attempts(resume=resume), self._watch_memory(), self._viewer.run())

    async def roll_out(self, model: ModelReady, hear: Callable[[Message], None]) -> None:
        """Makes rollouts for a trainer that is not ours. It is ended by the trainer's `finish`, or
        by the death of a part: the weights are the trainer's.
        """
        rollouts = self._ring(hear, model).run(Purpose.ROLLOUTS)
        await serve_while(rollouts, self._watch_memory(), self._viewer.run())

    def _ring(
        self,
        hear: Callable[[Message], None],
        model: ModelReady | None = None,
        *,
        budgets: RestartBudgets | None = None,
    ) -> Ring:
        def told(message: Message) -> None:
            hear(message)
            self._program.hear(message)

        self._newest = Ring(
            self._config,
            on_message=told,
            control_token=self._token.value,
            lock=self._lock,
            model=model,
            budgets=budgets,
            objects=self._program.objects,
            seconds=lambda: self._before + self.seconds,
        )
        return self._newest

    async def _attempts(self, *, resume: bool) -> None:
        budgets = RestartBudgets(self._config.run.restarts)

        async def attempt(number: int) -> None:
            goes_on = can_go_on(self._folder) if number else resume
            if number and not goes_on:
                self._trackers.drop()
                clear(self._folder)
            await self._ring(self.hear, budgets=budgets).run(Purpose.TRAIN, resume=goes_on)

        await budgets.keep(attempt, between=self._say_again)

    async def _say_again(self, restart: Restarted) -> None:
        """Says from where the run goes on. It waits for nothing."""
        where = "its last checkpoint" if can_go_on(self._folder) else "the beginning"
        self._terminal.say(
            f"{restart.error}\nThe run goes on from {where}{after(restart.seconds)}; "
            f"{restart.left} restarts are left."
        )

    def hear(self, message: Message) -> None:
        """Shows a message from a part. Drawing takes milliseconds."""
        match message:
            case Progress(status):
                self.status = status
                if status.step:
                    self._replaced.look()
                # only now is a resumed run's journal without the steps that are lost
                self._trackers.start()
                self._trackers.hear()
            case WarmStart():
                self.status = self._warming(message)
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

    def _warming(self, message: WarmStart) -> Status:
        """The status after a step of the warm start, with the last accuracy that was measured."""
        section = self._config.warm_start
        accuracy = message.accuracy
        before = self.status.warm_start
        if accuracy is None and before is not None:
            accuracy = before.accuracy
        warm = WarmStartStatus(
            message.step, section.max_steps, message.loss, accuracy, section.target_accuracy
        )
        return Status(
            name=self._config.run.name,
            phase=Phase.WARM_START,
            steps=self._config.run.steps,
            warm_start=warm,
        )

    async def _watch_memory(self) -> None:
        """Waits for the interval to pass, for ever; ended by its task group."""
        while True:
            self._memory.sample()
            await asyncio.sleep(MEMORY_SECONDS)

    def conclude(self, *, finished: bool) -> Summary:
        """Writes the summary and the plot of the run so far, also after an interruption or a
        failure. In that case it waits less for the plot.
        """
        began = time.monotonic()
        primary = source_names(self._config.environment.sources)[0]
        said = StartNotes(tuple(self._loss), opening.remarks(self._config))
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
            self._plot(finished=finished)
        left = max(0.5, WRITING_SECONDS - (time.monotonic() - began))
        self._trackers.end(seconds=ENDING_SECONDS if finished else left)
        self._replaced.look()
        if finished:
            self._replaced.wait()
        return summary

    def _plot(self, *, finished: bool) -> None:
        seconds = self._config.run.stall_seconds if finished else WRITING_SECONDS
        missing = draw_in_process(
            self._folder, title=self._config.run.name, seconds=seconds, patient=finished
        )
        if missing is not None:
            self._terminal.say(missing)
