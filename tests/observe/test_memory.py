"""Memory of a process tree, on a made /proc and on the real one."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from midflight.observe.memory import QUIET, PeakMemory, descendants, process_bytes, resident


def process(proc: Path, pid: int, parent: int, *, pss: int | None = None, rss: int | None = None, name: str = "python") -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(f"{pid} ({name}) S {parent} 0 0")
    if pss is not None:
        (folder / "smaps_rollup").write_text(f"Rss:  {2 * pss} kB\nPss:  {pss} kB\nPss_Dirty: 1 kB\n")
    if rss is not None:
        (folder / "status").write_text(f"Name: x\nVmRSS:\t{rss} kB\n")


def test_the_tree_is_found_whatever_the_names_of_its_processes(tmp_path: Path) -> None:
    process(tmp_path, 1, 0)
    process(tmp_path, 10, 1)
    process(tmp_path, 11, 10, name="a) R 1 (b")
    process(tmp_path, 12, 11)
    process(tmp_path, 20, 1)
    (tmp_path / "meminfo").write_text("")
    assert sorted(descendants(10, proc=tmp_path)) == [10, 11, 12]


def test_the_sum_is_of_proportional_sizes_and_the_peak_is_kept(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, pss=1024, rss=9999)
    process(tmp_path, 11, 10, pss=2048)
    memory = PeakMemory(10, proc=tmp_path)
    assert memory.sample() == 3.0
    process(tmp_path, 11, 10, pss=512)
    assert memory.sample() == 1.5
    elsewhere = PeakMemory(10, elsewhere=lambda: 2**20, proc=tmp_path)
    assert elsewhere.sample() == elsewhere.peak_mb == 2.5, "what other machines tell is added"
    assert memory.peak_mb == 3.0


def test_the_pages_of_a_process_are_walked_only_where_there_may_be_a_new_peak(tmp_path: Path) -> None:
    """The proportional size is read again when the resident size has grown, or has not been for a while."""
    memory = PeakMemory(10, proc=tmp_path)

    def sampled(*, pss: int, pages: int) -> float:
        process(tmp_path, 10, 1, pss=1024 * pss)
        (tmp_path / "10" / "statm").write_text(f"9999 {pages} 1 1 0 1 0")
        return memory.sample()

    assert sampled(pss=3, pages=1000) == 3.0
    assert sampled(pss=4, pages=1005) == 3.0, "half a per cent more is no growth"
    assert sampled(pss=5, pages=1200) == 5.0
    assert [sampled(pss=6, pages=1100) for _ in range(QUIET)] == [5.0] * (QUIET - 1) + [6.0]
    assert memory.peak_mb == 6.0


def test_resident_size_stands_in_where_the_kernel_gives_no_proportional_one(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, rss=100)
    assert process_bytes(10, proc=tmp_path) == 100 * 1024
    assert process_bytes(99, proc=tmp_path) == 0


def test_a_real_child_is_counted() -> None:
    code = "data = bytearray(b'x') * 50_000_000; print(flush=True); input()"
    memory = PeakMemory(os.getpid())
    before = memory.sample()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = memory.sample()
        child.communicate(b"\n")
    assert during - before > 40
    assert memory.peak_mb == max(before, during)


def test_resident_memory_is_told_by_the_kind_of_a_process(tmp_path: Path) -> None:
    """Pages as the system counts them; a process that is not of the run, and one that has ended, are left out."""
    commands = {"8": "python -m midflight.run.launcher.child trainer", "9": "python -m midflight.run.launcher.child engine embedded"}
    commands |= {"10": "python -m midflight.trackers.process runs/a", "11": "sh -c sleep"}
    (tmp_path / "7" / "task" / "7").mkdir(parents=True)
    (tmp_path / "7" / "task" / "7" / "children").write_text("8 9 10 11 ")
    (tmp_path / "7" / "statm").write_text("900 5 1 1 0 1 0")
    for pid, command in commands.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
        (tmp_path / pid / "statm").write_text(f"900 {pid} 1 1 0 1 0")
    page = resource.getpagesize()
    expected = {("trainer", "8"): 8 * page, ("engine", "9"): 9 * page, ("trackers", "10"): 10 * page, ("launcher", "7"): 5 * page}
    assert resident(7, proc=tmp_path) == expected
    (tmp_path / "9" / "statm").unlink()
    assert resident(7, proc=tmp_path) == {}, "between two looks one has ended: the next look is right again"
    assert resident(1234, proc=tmp_path) == {}
