"""A child process seen from the launcher."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

import pytest

from midflight.run.launcher.child import Child
from midflight.run.parts import ProcessKind


def test_a_signal_does_not_take_the_exit_status_from_whoever_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Popen` looks before it signals whether the process has ended; a status that it finds so is lost to the loop, which reports 255."""

    async def main() -> int:
        child = Child(ProcessKind.TRAINER, "trainer", log=tmp_path / "log", environ={})
        await child.start()
        with monkeypatch.context() as patch:
            patch.setattr(subprocess.Popen, "poll", lambda _: pytest.fail("it looked"))
            child.signal(signal.SIGKILL)
        status = await child.ended()
        child.signal(signal.SIGKILL)
        return status

    assert asyncio.run(main()) == -signal.SIGKILL
