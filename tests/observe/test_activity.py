"""Whether a process moves: on a clock that a test moves on, and of a real process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from midflight.observe.activity import ActivityProbe, ProcessActivity, ProcessWork, own_work, work_of

STALL = 120


class Process:
    """One whose work a test does. Looked at every second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.work: ProcessWork | None = ProcessWork(0.0, 0)
        self.motion = ProcessActivity(1, work=lambda _: self.work, clock=lambda: self.now)

    def pass_second(self, *, cpu: float = 0.0, num_bytes: int = 0, runnable: bool = False, said: str = "") -> float:
        """Seconds since it moved, at the end of a second in which it did this."""
        self.now += 1.0
        if self.work is not None:
            self.work = ProcessWork(self.work.cpu_seconds + cpu, self.work.num_bytes + num_bytes, "R" if runnable else "S")
        return self.motion.look(said)


@pytest.fixture
def process() -> Process:
    return Process()


def test_who_does_nothing_is_found_to_the_second(process: Process) -> None:
    assert [process.pass_second() for _ in range(STALL)] == list(range(1, STALL + 1))


def test_an_import_that_computes_three_times_the_bound_moves_all_the_time(process: Process) -> None:
    assert max(process.pass_second(cpu=0.6) for _ in range(3 * STALL)) == 0
    assert process.motion.what == "takes processor time"


def test_a_share_of_a_busy_core_is_enough(process: Process) -> None:
    assert max(process.pass_second(cpu=0.02) for _ in range(3 * STALL)) < 5


def test_who_reads_from_a_slow_disk_moves(process: Process) -> None:
    assert max(process.pass_second(num_bytes=100_000) for _ in range(3 * STALL)) == 0
    assert process.motion.what == "reads and writes"


def test_who_waits_for_a_processor_that_others_have_moves(process: Process) -> None:
    assert max(process.pass_second(runnable=True) for _ in range(3 * STALL)) <= 1
    assert process.motion.what == "waits for a processor"


def test_another_word_is_motion_and_the_same_one_is_not(process: Process) -> None:
    assert [process.pass_second(said=word) for word in ("a", "a", "b", "b", "b")] == [0, 1, 0, 1, 2]


def test_a_thread_that_only_looks_around_hides_no_hang(process: Process) -> None:
    """Beats of a hundredth of a percent of a core, some bytes, and seen running now and then by chance."""
    late = [process.pass_second(cpu=0.0005, num_bytes=60, runnable=second % 20 == 0) for second in range(STALL)]
    assert late[-1] == STALL


def test_the_end_of_a_part_of_it_is_motion(process: Process) -> None:
    process.pass_second(cpu=5.0)
    assert process.pass_second() == 1
    assert process.pass_second(cpu=-4.0) == 0


def test_a_time_in_which_the_watcher_itself_stood_is_not_counted(process: Process) -> None:
    process.pass_second()
    process.now += 3600  # a notebook was closed, or this process was stopped
    assert process.motion.look() == 1
    assert process.pass_second() == 2


def test_where_there_is_no_proc_everything_moves(process: Process) -> None:
    process.work = None
    assert max(process.pass_second() for _ in range(3 * STALL)) == 0


def test_the_work_of_a_process_counts_what_is_below_it_and_what_of_that_has_ended() -> None:
    # /proc counts in hundredths of a second, and rounds each of its numbers down.
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        work = work_of(process.pid)
        process.stdin.close()
    assert work is not None and work.cpu_seconds >= 0.3 and work.num_bytes > 1000


def test_the_state_and_the_work_of_one_process_are_its_own() -> None:
    work = own_work(os.getpid())
    assert work is not None and work.state in "RSD" and work.cpu_seconds > 0


def test_a_process_that_is_gone_has_done_nothing(tmp_path: Path) -> None:
    assert own_work(7, proc=tmp_path) is None
    assert work_of(7, proc=tmp_path) == ProcessWork(0.0, 0)
    assert work_of(7, proc=tmp_path / "none") is None


def test_who_asks_now_and_then_hears_whether_it_has_worked_since() -> None:
    now, work = 0.0, ProcessWork(5.0, 0)
    since = ActivityProbe(1, work=lambda _: work, clock=lambda: now)

    def asked(seconds: float, *, cpu: float = 0.0, num_bytes: int = 0) -> bool:
        nonlocal now, work
        now += seconds
        work = ProcessWork(work.cpu_seconds + cpu, work.num_bytes + num_bytes)
        return since()

    assert asked(18), "nothing is known of the time before"
    assert not asked(18) and not asked(18, cpu=0.1, num_bytes=1000), "it only looked around"
    assert asked(18, cpu=2.0) and asked(18, num_bytes=2**20) and asked(18, cpu=-4.0)
    assert not asked(18)
