"""Parts of the launcher without processes: what failures mean, who ends whom, numbers of versions."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from midflight.errors import BadReward, ConfigError, ModelNotFound, RunFailed, StoreFailed, first_error
from midflight.run.launcher.child import failure_of
from midflight.run.launcher.shutdown import Shutdown, main_task
from midflight.run.parts import Failed, PartLost, Restarted, Stalled, Verdict, decode_message, encode, serve_while
from midflight.run.places.port import PartFailed, error_of
from midflight.run.trainer.trainer_process import PublishedVersions
from midflight.wire.server import listen


async def _raise(error: Exception) -> None:
    raise error


async def _for_ever() -> None:
    await asyncio.Event().wait()


def test_services_run_as_long_as_the_main_part_and_their_failure_ends_it() -> None:
    ended: list[str] = []

    async def service() -> None:
        try:
            await _for_ever()
        finally:
            ended.append("service")

    async def main() -> int:
        await asyncio.sleep(0)
        return 7

    assert asyncio.run(serve_while(main(), service())) == 7
    assert ended == ["service"]
    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(serve_while(_for_ever(), _raise(RunFailed("broken"))))
    assert str(first_error(caught.value)) == "broken"


def test_a_service_that_ends_early_is_no_error() -> None:
    async def main() -> str:
        await asyncio.sleep(0.01)
        return "done"

    assert asyncio.run(serve_while(main(), asyncio.sleep(0))) == "done"


@pytest.mark.parametrize(
    ("error", "verdict", "kind", "has_traceback"),
    [
        (ModelNotFound("no model"), Verdict.CONFIG, ConfigError, False),
        (RunFailed("budget spent"), Verdict.FINAL, RunFailed, False),
        (StoreFailed("disk full"), Verdict.FINAL, RunFailed, False),
        (PartLost("gone"), Verdict.LOST, PartLost, False),
        (ZeroDivisionError("x"), Verdict.CRASH, PartFailed, True),
        (BadReward("odd"), Verdict.CRASH, PartFailed, True),
    ],
)  # fmt: skip
def test_i9_a_failure_says_whether_a_restart_helps_and_shows_its_traceback_only_for_a_crash(
    error: Exception, verdict: Verdict, kind: type[Exception], has_traceback: bool
) -> None:
    try:
        raise ExceptionGroup("outer", [ExceptionGroup("inner", [error])])
    except ExceptionGroup as group:
        said = failure_of(group)
    assert said.verdict is verdict and str(error) in said.error
    assert decode_message(encode(said)) == said
    shown = error_of("trainer", said)
    assert type(shown) is kind
    assert ("Traceback" in str(shown)) == has_traceback


def test_messages_of_the_launcher_itself_survive_the_wire() -> None:
    for message in (Restarted("engine0", "died", 1), Stalled("trainer hangs"), Failed("x", "", Verdict.FINAL)):
        assert decode_message(encode(message)) == message


def test_version_numbers_go_on_above_every_one_that_was_handed_out(tmp_path: Path) -> None:
    published = PublishedVersions(tmp_path / "published")
    assert published.highest() is None and published.resumed_as(4) == 4
    published.note(4)
    assert published.resumed_as(4) == 4, "nothing was handed out after the checkpoint"
    published.note(7)
    assert PublishedVersions(tmp_path / "published").resumed_as(4) == 8


def test_a_port_that_is_taken_is_named_with_the_remedy() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*gateway\.port"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_is_the_exit_status_and_a_second_one_ends_what_is_waited_for_at_once(number: signal.Signals, status: int) -> None:
    ended: list[str] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(os.kill, os.getpid(), number)
        try:
            await _for_ever()
        finally:
            os.kill(os.getpid(), number)
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("at once")

    before = signal.signal(number, signal.SIG_DFL if number is signal.SIGHUP else signal.getsignal(number))  # under nohup it is ignored
    try:
        assert main_task(work()) == status
    finally:
        signal.signal(number, before)
    assert ended == ["at once"]


def test_a_signal_that_is_ignored_stays_ignored_as_nohup_wants() -> None:
    async def work() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main_task(work()) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_errors_in_groups_reach_the_command_line_as_themselves() -> None:
    with pytest.raises(RunFailed, match="reason"):
        main_task(serve_while(_for_ever(), _raise(RunFailed("reason"))))


def test_a_command_runs_in_a_thread_and_where_an_event_loop_runs_already() -> None:
    async def work() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
        assert await process.wait() == 0

    async def in_notebook() -> int:
        return main_task(work())

    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(main_task(work())))
    thread.start()
    thread.join(30)
    assert found == [0]
    assert asyncio.run(in_notebook()) == 0


def test_another_thread_ends_a_command_in_order_and_then_at_once() -> None:
    stop, ended = Shutdown(), list[str]()

    async def work() -> None:
        threading.Thread(target=stop.ask).start()
        try:
            await _for_ever()
        finally:
            threading.Thread(target=stop.ask).start()
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("at once")

    assert main_task(work(), stop=stop) == 130
    assert ended == ["at once"]


def test_what_is_asked_before_a_command_begins_is_not_forgotten() -> None:
    stop = Shutdown()
    stop.ask(signal.SIGTERM)
    assert main_task(_for_ever(), stop=stop) == 143


def test_an_interrupted_cell_of_a_notebook_ends_its_command() -> None:
    async def in_notebook() -> int:
        async def work() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            await _for_ever()

        return main_task(work())

    loop = asyncio.new_event_loop()  # as a kernel's: `asyncio.run` would take the signal for itself
    try:
        assert loop.run_until_complete(in_notebook()) == 130
    finally:
        loop.close()


def test_errors_come_out_of_a_thread_as_themselves() -> None:
    async def in_notebook() -> None:
        main_task(_raise(RunFailed("reason")))

    with pytest.raises(RunFailed, match="reason"):
        asyncio.run(in_notebook())
