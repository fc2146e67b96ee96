"""Nothing outlives whoever started it, at whichever instant that is killed. All processes are real; each carries a mark in its environment."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="processes are looked for in /proc and waited for by pidfd")
MARK = "MIDFLIGHT_TEST_MARK"
SECONDS = 60.0
"""For what should be gone at once: a busy machine gives a process that ends no time to do so."""

MANY = """
import asyncio, sys
from pathlib import Path
from midflight.config.sections import EnvironmentSection
from midflight.run.parts import ProcessKind, WorkerSpec
from midflight.run.places.port import ChildOrder
from midflight.run.places.process import LocalChild

async def main(url, folder):
    print("begins", flush=True)
    for number in range(8):
        child = LocalChild(ChildOrder(ProcessKind.WORKER, f"worker{number}", f"{folder}/worker{number}.log", {}))
        await child.start()
        await child.tell(WorkerSpec(child.name, url, "token", EnvironmentSection().model_dump_json()))
        print(child.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""
"""A launcher that starts many parts. Each has its spec at once, as those of a run have that begins with a model."""

ALONE = """
import asyncio, sys
from pathlib import Path
from midflight.run import orphan_guard
from midflight.run.parts import ProcessKind
from midflight.run.places import process
from midflight.run.places.port import ChildOrder

async def main(folder, part):
    orphan_guard.GRACE_SECONDS = 0.1
    process.COMMAND = (sys.executable, "-I", "-S", "-c", part)
    child = process.LocalChild(ChildOrder(ProcessKind.WORKER, "worker0", f"{folder}/worker0.log", {}))
    await child.start()
    async for line in child.process.stdout:
        print(line.decode(), end="", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""
"""A launcher with one part, which is a program of the test's and says lines."""

DEAF = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); signal.pause()"
STOPPED = "import os, signal; print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
FAMILY = """
import os, signal, subprocess
child = subprocess.Popen(["sleep", "1000"], process_group=0, stdout=subprocess.DEVNULL)
print(os.getpid(), child.pid, flush=True)
signal.pause()
"""
"""It starts another process, in a group of its own."""

TRIAL = """
import sys
from midflight.config.load import load_config
from midflight.run.launcher.checks.check import Plan
from midflight.run.launcher.checks.table import trial
trial(Plan(load_config(None, ["environment.entry=hangs:solve"])))
"""
HANGS = """
import socket
socket.create_connection(("127.0.0.1", {port})).recv(1)
"""


class Marked:
    """A program whose descendants are all known, though their parents may be gone."""

    def __init__(self, code: str, *words: str) -> None:
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, env={**os.environ, MARK: self._mark})
        assert self.process.stdout is not None
        self.out: IO[bytes] = self.process.stdout

    def line(self) -> str:
        return self.out.readline().decode().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def members(self) -> list[int]:
        """All that run, the program itself among them. One that is about to become another has no environment for an instant."""
        found: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={self._mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def all_end(self) -> bool:
        """Whether none is left. Waits for the end of each, `SECONDS` at most."""
        deadline = time.monotonic() + SECONDS
        while found := self.members():
            for pid in found:
                if not ends(pid, seconds=deadline - time.monotonic()):
                    return False
        return True


def ends(pid: int, *, seconds: float = SECONDS) -> bool:
    """Waits for the end of a process."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], max(0.0, seconds))[0])
    finally:
        os.close(descriptor)


@pytest.fixture
def programs() -> Iterator[list[Marked]]:
    """At the end of a test nothing of them is left, also where it has failed."""
    made: list[Marked] = []
    yield made
    for program in made:
        program.kill()
        program.out.close()
        for pid in program.members():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def deaf_gateway() -> Iterator[str]:
    """An address that takes connections and never answers, so that workers stay."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_launcher_that_is_killed_while_it_starts_many_parts_leaves_none(
    programs: list[Marked], deaf_gateway: str, tmp_path: Path
) -> None:
    chosen = random.Random(29)
    for _ in range(4):
        programs.append(launcher := Marked(MANY, deaf_gateway, str(tmp_path)))
        for _ in range(1 + chosen.randint(0, 8)):
            assert launcher.line()
        time.sleep(chosen.random() / 50)  # in the midst of the next start, or of what the parts import
        launcher.kill()
        assert launcher.all_end()


@pytest.mark.parametrize("part", [DEAF, STOPPED], ids=["deaf", "stopped"])
def test_a_part_that_cannot_end_in_order_is_killed_when_its_launcher_is_gone(programs: list[Marked], part: str, tmp_path: Path) -> None:
    programs.append(launcher := Marked(ALONE, str(tmp_path), part))
    assert launcher.line()
    launcher.kill()
    assert launcher.all_end()


def test_what_agents_have_started_ends_when_their_worker_dies_and_when_the_launcher_does(programs: list[Marked], tmp_path: Path) -> None:
    """Also where both are killed at the same time."""
    for kills in ("worker", "launcher", "both"):
        programs.append(launcher := Marked(ALONE, str(tmp_path), FAMILY))
        worker, started = map(int, launcher.line().split())
        if kills != "launcher":
            os.kill(worker, signal.SIGKILL)
        if kills != "worker":
            launcher.kill()
        assert ends(started) and ends(worker)


def test_a_command_that_is_killed_while_it_tries_a_configuration_leaves_nothing_of_the_trial(
    programs: list[Marked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (tmp_path / "hangs.py").write_text(HANGS.format(port=listener.getsockname()[1]))
        programs.append(command := Marked(TRIAL))
        listener.settimeout(SECONDS)
        with listener.accept()[0]:  # the module is being imported
            command.kill()
            assert command.all_end()
