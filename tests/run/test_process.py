"""A child process seen from the launcher."""

from __future__ import annotations

import asyncio
import errno
import signal
import subprocess
from pathlib import Path

import pytest
from safetensors import SafetensorError

from midflight.errors import ConfigError, RunFailed, StoreFailed
from midflight.run.heartbeat import Beat
from midflight.run.launcher.child import failure_of
from midflight.run.parts import SEATED_VARIABLE, Failed, Message, PartLost, ProcessKind, Verdict
from midflight.run.places import process
from midflight.run.places.port import ChildOrder
from midflight.run.places.process import LocalChild


def test_a_signal_does_not_take_the_exit_status_from_whoever_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Popen` looks before it signals whether the process has ended; a status that it finds so is lost to the loop, which reports 255."""

    async def main() -> int:
        child = LocalChild(ChildOrder(ProcessKind.TRAINER, "trainer", str(tmp_path / "log"), {}))
        await child.start()
        with monkeypatch.context() as patch:
            patch.setattr(subprocess.Popen, "poll", lambda _: pytest.fail("it looked"))
            child.signal(signal.SIGKILL)
        status = await child.ended()
        child.signal(signal.SIGKILL)
        return status

    assert asyncio.run(main()) == -signal.SIGKILL


def test_a_death_says_whether_somebody_outside_has_killed_the_part(tmp_path: Path) -> None:
    child = LocalChild(ChildOrder(ProcessKind.ENGINE, "engine0", str(tmp_path / "log"), {}))
    killed = {-signal.SIGKILL: True, -signal.SIGTERM: True, 143: True, -signal.SIGSEGV: False, 1: False}
    assert {status: child.died(status).was_killed for status in killed} == killed
    child.condemn("engine0 hangs")
    assert not child.died(-signal.SIGKILL).was_killed, "the launcher has"


def test_a_part_whose_log_is_on_a_full_disk_still_says_why_it_ended() -> None:
    async def main() -> list[Message]:
        child = LocalChild(ChildOrder(ProcessKind.ROLLOUT, "rollout", "/dev/full", {}, ["no_such_module:solve"]))
        await child.start()
        said = [message async for message in child.messages() if not isinstance(message, Beat)]
        await child.ended()
        return said

    (said,) = asyncio.run(main())
    assert isinstance(said, Failed) and said.verdict is Verdict.CONFIG and "no module 'no_such_module'" in said.error


def test_a_part_below_a_seat_tells_its_memory_and_one_that_the_launcher_sees_itself_does_not(tmp_path: Path) -> None:
    async def main() -> list[int]:
        told: list[int] = []
        for environ in ({}, {SEATED_VARIABLE: "1"}):
            child = LocalChild(ChildOrder(ProcessKind.WORKER, "worker0", str(tmp_path / "log"), environ))
            await child.start()
            beat = await anext(aiter(child.messages()))
            assert isinstance(beat, Beat)
            told.append(beat.memory_bytes)
            child.signal(signal.SIGKILL)
            await child.ended()
        return told

    silent, told = asyncio.run(main())
    assert silent == 0 and told > 2**20


def test_a_log_that_grew_too_long_is_cut_to_its_end_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_LOG_BYTES", 100)
    monkeypatch.setattr(process, "KEPT_LOG_BYTES", 10)
    child = LocalChild(ChildOrder(ProcessKind.WORKER, "worker0", str(tmp_path / "log"), {}))
    child.cut_log()  # there is none yet
    with child.log.open("ab", buffering=0) as log:
        log.write(b"a" * 95 + b"12345")
        child.cut_log()
        assert child.log.stat().st_size == 100
        log.write(b"6789\n")
        child.cut_log()
        log.write(b"next\n")
    assert child.log.read_text().splitlines()[1:] == ["123456789", "next"]


NO_SPACE = OSError(errno.ENOSPC, "No space left on device", "/run/checkpoints/x")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NO_SPACE, "Writing /run/checkpoints/x: No space left on device; free some space and go on with --resume."),
        (RuntimeError("Error while serializing: I/O error: File too large (os error 27)"), "os error 27"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "free some space"),
        (ExceptionGroup("two", [PartLost("the rollout process is gone"), NO_SPACE]), "No space left"),
        (StoreFailed("Writing store.sqlite: database or disk is full"), "Writing store.sqlite"),
        (RunFailed("a budget is spent"), "a budget"),
    ],
)
def test_a_full_disk_and_a_spent_budget_end_a_run_whatever_came_with_them(error: Exception, words: str) -> None:
    failed = failure_of(error)
    assert failed.verdict is Verdict.FINAL and words in failed.error


def test_a_wrong_configuration_ends_a_run_and_a_crash_is_one() -> None:
    group = ExceptionGroup("three", [KeyError("x"), ConfigError("model.path is wrong"), PartLost("gone")])
    assert (failure_of(group).verdict, failure_of(group).error) == (Verdict.CONFIG, "model.path is wrong")
    assert failure_of(KeyError("x")).verdict is Verdict.CRASH
    assert failure_of(OSError(errno.EIO, "I/O error")).verdict is Verdict.CRASH


def test_an_error_that_explains_itself_keeps_its_words_though_a_full_disk_caused_it() -> None:
    try:
        raise ConfigError("/dev/shm has no room for a version") from NO_SPACE
    except ConfigError as error:
        assert failure_of(error).error == "/dev/shm has no room for a version"
