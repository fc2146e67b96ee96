"""I9: every kind of process times every kind of fault. Within `stall_seconds` and the measured delay of beats there is progress, or an error
with the right name. The launcher's ring is the real one; its processes are played, on virtual time."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midflight.config.load import load_config
from midflight.config.sections import Config
from midflight.errors import every_error
from midflight.observe.activity import ProcessWork
from midflight.observe.status import Phase, Status
from midflight.run import parts
from midflight.run.heartbeat import Beat, Doing
from midflight.run.launcher.ring import Ring
from midflight.run.launcher.watchdog import LOOK_SECONDS, REST_SECONDS, Watchdog
from midflight.run.parts import Failed, Message, ModelReady, Progress, Purpose, Ready, Restarted, Stalled, Verdict
from midflight.run.places.port import ChildOrder, PartFailed, Wants
from midflight.testing.virtual_time import run_virtual

KINDS = ("rollout", "rollout1", "trainer", "trainer1", "engine0", "engine1", "teacher", "worker0", "worker1")
"""Gateway and further shard, both ranks, an engine, a companion of a server (which is an engine to the launcher), teacher, workers."""
FAULTS = ("stopped", "blocked", "disconnected", "killed", "slow", "out of memory")
OPTIONS = (
    "gateway.shards=2",
    "trainer.ranks=2",
    "engine.count=2",
    "environment.entry=agents:solve",
    "environment.workers=1",
    "model.path=model",
    "distillation.teacher=teacher",
)
EVENTFUL = 8.0
"""Seconds that a start, stacks, a back-off of a part that died once and a lost peer's own reason may take together."""


@dataclass
class Site:
    """A machine on which the processes of one run are played. All are needed for a step, as on the worst day."""

    folder: Path
    stall: float
    lateness: float
    """Seconds that any beat may be late: the machine is busy."""
    seed: int
    faults: dict[str, str] = field(default_factory=dict)
    """Of processes that live, by name; a process that is started again has none."""
    lives: dict[int, Played] = field(default_factory=dict)
    said: list[tuple[float, Message]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    """When each was made."""
    spared: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def work(self, pid: int) -> ProcessWork:
        child = self.lives[pid]
        return ProcessWork(0.0 if child.fault in ("stopped", "blocked") else self.now(), 0, "T" if child.fault == "stopped" else "S")

    def newest(self) -> dict[str, Played]:
        return {child.name: child for child in self.lives.values()}

    def moves(self) -> bool:
        """Whether a step is made now: every part is up and does what it should, if slowly."""
        newest = self.newest()
        return all(name in newest and newest[name].works for name in KINDS)

    # --- Places --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        pass

    async def watch(self) -> None:
        pass

    async def take(
        self, part: parts.ProcessKind, *, host: str | None = None, port: int = 0, for_ever: bool = False, wants: Wants | None = None
    ) -> Spot:
        return Spot(self)

    async def take_all(self, part: parts.ProcessKind, count: int) -> Sequence[Spot]:
        return [Spot(self) for _ in range(count)]


@dataclass
class Spot:
    site: Site
    host = "127.0.0.1"
    port = fd = 7
    lost = is_recalled = False

    async def recalled(self) -> None:
        await asyncio.Event().wait()

    def child(self, order: ChildOrder, **given: Any) -> Played:
        return Played(self.site, order.part, order.name)

    def refuse(self) -> None:
        pass

    def close(self) -> None:
        pass


class Played:
    """A process, which beats and says what a part of its kind says."""

    was_started = False
    state = "?"

    def __init__(self, site: Site, part: parts.ProcessKind, name: str) -> None:
        self.site, self.part, self.name, self.pid = site, part, name, len(site.lives)
        self.fault = ""
        self.told, self.up = asyncio.Event(), False
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.why = ""

    @property
    def running(self) -> bool:
        return self.was_started and not self.status.done()

    @property
    def works(self) -> bool:
        return self.up and self.running and self.fault in ("", "slow")

    async def start(self) -> None:
        self.was_started = True
        self.site.lives[self.pid] = self

    async def tell(self, spec: parts.Spec) -> None:
        self.told.set()

    async def messages(self) -> AsyncIterator[Message]:
        """Ends with the process, or when it closes its end."""
        turned = self.site.now()
        while not self.status.done() and self.fault != "disconnected":
            await asyncio.wait([self.status], timeout=1 + self.late())
            if self.status.done() or self.fault in ("stopped", "disconnected"):
                await asyncio.sleep(0)
                continue
            if self.fault == "out of memory":
                yield Failed("MemoryError: ", "Traceback: in the middle of it\nMemoryError", Verdict.CRASH)
                self.die(1)
                continue
            turned = turned if self.fault == "blocked" else self.site.now()
            yield Beat(turned, self.doing(), at=self.site.now())
            if self.told.is_set() and not self.up and self.works_so_far:
                self.up = True
                yield ModelReady("model", 0) if self.name == "trainer" else Ready()
            if self.name == "rollout" and self.up and self.site.moves():
                self.site.steps.append(self.site.now())
                yield Progress(Status(phase=Phase.TRAINING, step=len(self.site.steps)))

    def late(self) -> float:
        """Seconds that its next beat is late: on a busy machine any beat, and of one that gets little processor by half of what it may be silent."""
        own = min(6.0, self.site.stall / 2) if self.fault == "slow" else 0.0
        return self.site.random.uniform(0, self.site.lateness) + self.site.random.uniform(0, own)

    @property
    def works_so_far(self) -> bool:
        return self.fault in ("", "slow")

    def doing(self) -> tuple[Doing, ...]:
        now = self.site.now()
        match self.name:
            case "trainer":
                return (Doing("waits for groups of version 3", now, whom="rollout"),)
            case "trainer1":
                return (Doing("does what the first rank does", now, limit=1e9),)
            case "rollout" | "rollout1":
                worker = "worker1" if self.name == "rollout1" else "worker0"
                return (Doing(f"runs rollout 0-0-0 in {worker}", now, whom=worker, limit=3600.0),)
            case "worker0" | "worker1":
                return (Doing("runs the agent of 0-0-0", now),)
            case _:
                return ()

    def die(self, status: int) -> None:
        if not self.status.done():
            self.status.set_result(status)

    async def ended(self) -> int:
        return await asyncio.shield(self.status)

    async def stacks(self) -> str:
        await asyncio.sleep(1)
        return "its stacks"

    def cut_log(self) -> None:
        pass

    def condemn(self, why: str) -> None:
        self.why = f"{why}. It was ended."
        self.signal(signal.SIGKILL)

    def died(self, status: int) -> PartFailed:
        return PartFailed(self.why or f"{self.name} ended with {status}", part=self.name)

    def signal(self, number: signal.Signals) -> None:
        if number is signal.SIGKILL or self.fault != "stopped":
            self.die(-number)

    def end_group(self) -> None:
        self.die(-signal.SIGKILL)


def ring_of(site: Site) -> Ring:
    class PlayedRing(Ring):
        def _new_places(self, config: Config) -> Any:
            return site

        async def _spare(self, worker: str) -> None:
            site.spared.append(worker)

    config = load_config(None, [f"run.folder={site.folder}", f"run.stall_seconds={site.stall}", "run.restarts=5", *OPTIONS])
    dog = Watchdog(stall_seconds=site.stall, work=site.work, clock=site.now)
    return PlayedRing(
        config, on_message=lambda message: site.said.append((site.now(), message)), control_token="control-token-of-the-test", watchdog=dog
    )


@dataclass
class Outcome:
    moved: bool
    """Steps were made in the end."""
    after: float | None
    """Seconds from the fault until somebody was named, or the next step was made while the fault was still there."""
    named: Mapping[str, str]
    """What was said of each part that was named."""
    site: Site


def play(folder: Path, kind: str, fault: str, *, stall: float, lateness: float = 0.0, at: float = 30.0, seed: int = 0) -> Outcome:
    (folder / "checkpoints" / "version-1").mkdir(parents=True)  # so that a trainer can go on

    async def main() -> Outcome:
        site = Site(folder, stall, lateness, seed)
        ring, named, first = ring_of(site), dict[str, str](), list[float]()

        async def strike() -> None:
            while not site.steps:
                await asyncio.sleep(1)
            await asyncio.sleep(at)
            child, began = site.newest()[kind], site.now()
            child.fault = fault
            if fault == "killed":
                child.die(-signal.SIGKILL)
            first.append(began)
            await asyncio.sleep(3 * (stall + lateness) + 4 * EVENTFUL)
            raise TimeoutError  # enough was seen

        errors: list[BaseException] = []
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(ring.run(Purpose.TRAIN))
                group.create_task(strike())
        except BaseExceptionGroup as failures:
            errors = [one for one in every_error(failures) if not isinstance(one, TimeoutError)]
        began, times = first[0], list[float]()
        for when, message in site.said:
            if when >= began and isinstance(message, Restarted):
                named.setdefault(message.part, message.error)
                times.append(when)
            elif when >= began and isinstance(message, Stalled):
                times.append(when)
        for error in errors:
            assert isinstance(error, PartFailed), error
            named.setdefault(error.part, str(error))
            times.append(site.now())
        later = [when for when in site.steps if when > began]
        return Outcome(bool(later), min([*times, *later[:1]], default=None) and min([*times, *later[:1]]) - began, named, site)

    return run_virtual(main, seed=seed, max_seconds=1e5)


def check(folder: Path, kind: str, fault: str, **more: Any) -> None:
    it = play(folder, kind, fault, **more)
    if fault == "slow":
        assert not it.named and it.moved, f"a slow part is sound, and what is slow is no reason to end it: {it.named}"
        return
    bound = it.site.stall + it.site.lateness + 2 * (LOOK_SECONDS + it.site.lateness) + REST_SECONDS + EVENTFUL
    assert it.after is not None and it.after <= bound, f"{kind} {fault}: nobody was named and nothing moved for {it.after} s"
    assert set(it.named) == {kind}, f"{kind} {fault}: {it.named}"
    words = {"stopped": "stopped", "blocked": "blocked", "disconnected": "not heard of", "killed": "-9", "out of memory": "MemoryError"}
    assert words[fault] in it.named[kind]
    assert it.site.spared == ([kind] if (fault, kind[:6]) == ("stopped", "worker") else [])


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_i9_every_process_and_every_fault_end_in_progress_or_in_its_name(kind: str, fault: str, tmp_path: Path) -> None:
    check(tmp_path, kind, fault, stall=10.0)


@settings(max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    fault=st.sampled_from(FAULTS),
    stall=st.floats(4, 200),
    busy=st.floats(0, 1),
    at=st.floats(0, 300),
    seed=st.integers(0, 2**20),
)
def test_i9_so_at_any_instant_with_any_patience_and_on_a_busy_machine(
    kind: str, fault: str, stall: float, busy: float, at: float, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Beats are late by three seconds, or by a quarter of the patience."""
    check(tmp_path_factory.mktemp("run"), kind, fault, stall=stall, lateness=busy * min(3.0, stall / 4), at=at, seed=seed)
