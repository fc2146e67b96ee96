"""A disk that is full in the middle of a run: it is said once, with what to do, and the run goes on where it was when there is room again.

The disk is a file system in memory, in a mount namespace of its own, which outlives the runs. Real processes.
"""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .processes import CONFIG, ENVIRON, steps, without_waiting

pytestmark = pytest.mark.timeout(900)
MEGABYTES = 24
CHUNKS = (2**20, 2**12, 1)
PATIENCE = 120.0


class Disk:
    """A small disk, and the commands that see it."""

    def __init__(self, holder: subprocess.Popen[str], place: Path) -> None:
        self._holder = holder
        self._place = place
        self.inside = Path(f"/proc/{holder.pid}/root{place}")
        """The same disk, for programs that do not see it."""

    def started(self, *words: object) -> subprocess.Popen[bytes]:
        into = ["nsenter", f"--target={self._holder.pid}", "--user", "--mount", "--preserve-credentials"]
        there = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", self._place.parent]  # the folder as it is within
        command = [*into, *there, sys.executable, "-m", "midflight", *map(str, words)]
        said = self._place.with_name("said.txt")
        with said.open("wb") as output:
            return subprocess.Popen(command, env=ENVIRON, stdout=output, stderr=output)

    def ended(self, process: subprocess.Popen[bytes]) -> tuple[int, str]:
        try:
            return process.wait(PATIENCE), self._place.with_name("said.txt").read_text()
        finally:
            process.kill()

    def fill(self) -> None:
        """Writes until there is no room for a byte."""
        with (self.inside / "ballast").open("wb", buffering=0) as file:
            for size in CHUNKS:
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError as error:
                    assert error.errno == errno.ENOSPC

    def free(self) -> None:
        (self.inside / "ballast").unlink()


@contextmanager
def small_disk(place: Path) -> Generator[Disk]:
    place.mkdir()
    made = f"mount -t tmpfs -o size={MEGABYTES}m tmpfs {place} && echo ready && exec sleep infinity"
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", made]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            if holder.stdout.readline() != "ready\n":
                pytest.skip("this user may not mount a small disk")
            yield Disk(holder, place)
        finally:
            holder.kill()


@pytest.mark.parametrize("every", [1, 0], ids=["with checkpoints", "without"])
def test_i8_a_disk_that_fills_up_ends_the_run_in_a_sentence_and_nothing_is_lost(tmp_path: Path, every: int) -> None:
    """Whatever is written next is what fails: a checkpoint, the store, the journal."""
    (tmp_path / "small.toml").write_text(CONFIG)
    with small_disk(tmp_path / "disk") as disk:
        run = disk.inside / "run"
        options = ("small.toml", "--folder", "disk/run", "--set", f"trainer.checkpoint_every={every}")
        process = disk.started("train", *options, "--set", "run.steps=100000")
        deadline = time.monotonic() + PATIENCE
        while len(steps(run)) < 3:
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "said.txt").read_text()
            time.sleep(0.05)
        disk.fill()
        status, said = disk.ended(process)
        assert status == 1, said
        assert "Traceback" not in said and without_waiting(said).count("midflight: ") == 1, said
        assert "free some space" in said and "disk/run" in said, said
        kept = len(steps(run))
        disk.free()
        status, said = disk.ended(disk.started("train", *options, "--resume", "--set", f"run.steps={kept + 3}"))
        assert status == 0, said
        assert [line["step"] for line in steps(run)] == list(range(1, kept + 4)), "versions that were given out are not given again"
        status, said = disk.ended(disk.started("ledger", "disk/run"))
        assert status == 0 and "does not add up" not in said, said
