"""Control groups of programs: which are asked for, what is written to them, and that none is left."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from tests.environments.test_sandboxes import made

from midflight.environments.sandboxes import bubblewrap, control_groups
from midflight.environments.sandboxes.control_groups import ControlGroup, Hierarchy, found_hierarchies, new_group

isolates = pytest.mark.skipif(
    not shutil.which("bwrap") or found_hierarchies() is None, reason="it needs bubblewrap, and a place for control groups"
)


def unified(root: Path, **groups: str) -> Path:
    """A hierarchy of version 2 as files: the controllers that each group hands down. Returns the list of our own group."""
    for name, handed_down in groups.items():
        folder = root / name.replace("__", "/").strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.controllers").write_text("cpu memory pids\n")
        (folder / "cgroup.subtree_control").write_text(handed_down)
    own = root.with_name("own")
    own.write_text(f"0::/{list(groups)[-1].replace('__', '/')}\n")
    return own


def test_version_2_is_asked_from_our_own_group_upwards(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    own = unified(root, _="cpu memory pids", user__run="")
    (root / "user").mkdir(exist_ok=True)
    (root / "user" / "cgroup.controllers").write_text("cpu\n")
    (root / "cgroup.controllers").write_text("cpu memory pids\n")
    (root / "cgroup.subtree_control").write_text("cpu memory pids")
    found = [hierarchies[0].folder for hierarchies in control_groups._candidates(root, own)]
    assert found == [root / "user" / "run", root]
    assert (root / "user" / "run" / "cgroup.subtree_control").read_text() == "+memory +pids", "it hands them down now"


def test_a_group_of_version_2_gets_its_limits_and_no_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hierarchy = Hierarchy(tmp_path, memory="memory.max", swap="memory.swap.max", processes="pids.max", events="memory.events")
    monkeypatch.setattr(control_groups, "found_hierarchies", lambda: (hierarchy,))
    mkdir = Path.mkdir

    def with_swap(folder: Path) -> None:
        mkdir(folder)
        (folder / "memory.swap.max").write_text("max")

    monkeypatch.setattr(Path, "mkdir", with_swap)
    group = new_group(memory_bytes=2**20, processes=7)
    assert group is not None
    ((_, folder),) = group.places
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "memory.max": "1048576",
        "memory.swap.max": "0",
        "pids.max": "7",
    }
    assert not group.was_entered and not group.ran_out
    (folder / "memory.stat").write_text("anon 0\npgfault 12\n")
    (folder / "memory.events").write_text("max 3\noom 1\noom_kill 1\n")
    assert group.was_entered and group.ran_out


def test_a_group_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-such"):
        control_groups._made([Hierarchy(tmp_path), Hierarchy(tmp_path / "no-such")], memory_bytes=1, processes=1)
    assert not list(tmp_path.iterdir())


@isolates
def test_the_kernel_holds_programs_to_their_limit_when_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "held", lambda pid, group: 0)
    code = "import os, time\nfor _ in range(6):\n  if os.fork() == 0:\n    x = b'1' * (60 * 2**20); time.sleep(60)\ntime.sleep(60)"
    found = asyncio.run(made(kind="bubblewrap", memory_mb=128).python(code))
    assert found.ended_by == "memory", found


@isolates
def test_no_group_is_left_however_a_program_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[ControlGroup | None] = []

    def remembered(**limits: int) -> ControlGroup | None:
        groups.append(new_group(**limits))
        return groups[-1]

    monkeypatch.setattr(bubblewrap, "new_group", remembered)
    sandbox = made(kind="bubblewrap", seconds=0.5)
    for code in ("print(1)", "import time; time.sleep(60)", "import os\nwhile True: os.write(1, b'x' * 65536)"):
        asyncio.run(sandbox.python(code))
    last = made(kind="bubblewrap")
    for _ in range(100):
        asyncio.run(last.python("pass"))
        *earlier, _ = groups
        if not any(folder.exists() for group in earlier if group for _, folder in group.places):
            return
    pytest.fail("groups of programs that have ended are still there")
