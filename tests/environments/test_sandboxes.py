"""Programs that try to get out of their sandbox, and what a limit makes of those that take too much.

What isolates is tried where it can be: with bubblewrap, as root and as a user that has no rights.
"""

import asyncio
import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from midflight.config.agents import SandboxSection
from midflight.environments.sandboxes.choice import sandbox_of
from midflight.environments.sandboxes.port import ProgramResult, Sandbox
from midflight.errors import ConfigError, SandboxUnavailable

LIMITS = {"seconds": 30.0, "memory_mb": 256, "disk_mb": 4, "processes": 12}


def made(**options: object) -> Sandbox:
    return sandbox_of(SandboxSection.model_validate(LIMITS | options))


@pytest.fixture(scope="module", params=["bubblewrap", "trusted"])
def either(request: pytest.FixtureRequest) -> Sandbox:
    return opened(request.param)


@pytest.fixture(scope="module")
def closed() -> Sandbox:
    return opened("bubblewrap")


def opened(kind: str) -> Sandbox:
    try:
        return made(kind=kind)
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def ran(sandbox: Sandbox, code: str, **given: object) -> ProgramResult:
    return asyncio.run(sandbox.python(code, **given))  # type: ignore[arg-type]


# --- What it is for ---------------------------------------------------------------------------------------------------


def test_a_program_reads_its_files_and_its_input_and_says_what_it_finds(either: Sandbox) -> None:
    code = "import sys; print(open('data/in.txt').read() + sys.stdin.read()); print('oh', file=sys.stderr); sys.exit(3)"
    found = ran(either, code, files={"data/in.txt": "a"}, stdin="b")
    assert (found.status, found.stdout, found.stderr, found.ended_by, found.ok) == (3, "ab\n", "oh\n", None, False)


def test_nothing_of_our_environment_reaches_it(either: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDFLIGHT_CONTROL_TOKEN", "secret")
    found = ran(either, "import os; print(os.environ)")
    assert found.ok and "secret" not in found.stdout and "MIDFLIGHT" not in found.stdout


def test_programs_run_side_by_side(closed: Sandbox) -> None:
    async def all_of() -> list[ProgramResult]:
        return await asyncio.gather(*(closed.python(f"print({n} + 1)") for n in range(4)))

    assert [found.stdout for found in asyncio.run(all_of())] == ["1\n", "2\n", "3\n", "4\n"]


@pytest.mark.parametrize("name", ["/etc/passwd", "../out", "a/../../b", ""])
def test_a_file_that_would_lie_outside_its_folder_is_refused(either: Sandbox, name: str) -> None:
    with pytest.raises(ValueError, match="relative path"):
        ran(either, "", files={name: "x"})


# --- Limits -----------------------------------------------------------------------------------------------------------


def test_time_ends_a_program_and_what_it_has_started() -> None:
    for kind in ("bubblewrap", "trusted"):
        sandbox = made(kind=kind, seconds=1.0) if kind == "trusted" or shutil.which("bwrap") else None
        if sandbox is not None:
            found = ran(sandbox, "import subprocess; subprocess.Popen(['sleep', '77.125']); print(1, flush=True)\nwhile True: pass")
            assert (found.status, found.ended_by, found.stdout) == (None, "time", "1\n")
            assert not running("77.125"), f"{kind} left a process"


def test_output_is_cut_and_ends_it(either: Sandbox) -> None:
    found = ran(either, "while True: print('x' * 1000)")
    assert (found.status, found.ended_by, len(found.stdout)) == (None, "output", 1_000_000)


def test_one_process_cannot_have_more_memory_than_all_may_have(either: Sandbox) -> None:
    found = ran(either, "x = bytearray(10**9)")
    assert found.status == 1 and "MemoryError" in found.stderr


def test_several_processes_cannot_either(either: Sandbox) -> None:
    code = "import os, time\nfor _ in range(4):\n  if os.fork() == 0:\n    x = b'1' * (100 * 2**20); time.sleep(60)\ntime.sleep(60)"
    assert ran(either, code).ended_by == "memory"


def test_a_file_cannot_be_larger_than_the_disk(either: Sandbox) -> None:
    assert ran(either, "open('x', 'wb').write(b'0' * 10**7)").status != 0


def test_an_end_that_is_cancelled_leaves_nothing(either: Sandbox) -> None:
    async def cancelled() -> None:
        running = asyncio.create_task(either.run(["sleep", "78.125"]))
        while not running_now("78.125"):
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])

    running_now = running
    asyncio.run(cancelled())
    assert not running("78.125")


# --- Ways out ---------------------------------------------------------------------------------------------------------


def test_it_sees_no_file_of_ours_and_can_change_none_of_the_systems(closed: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("42")
    secret.chmod(0o666)
    at_home = [str(path) for path in Path.home().iterdir() if path.is_file()]
    code = f"""
import os, pathlib
for path in {[str(secret), *at_home]} + ['/etc/passwd', '/etc/shadow', '/home']:
    assert not os.path.exists(path), path
for path in ('/usr/bin/x', '/bin/x', '/x', '/dev/x', '/proc/sys/kernel/hostname', '/etc/x'):
    try:
        pathlib.Path(path).write_text('1')
    except OSError:
        continue
    raise SystemExit(path)
"""
    found = ran(closed, code)
    assert found.ok, found


def test_it_reaches_no_server_of_this_machine(closed: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=5)"
        assert "ConnectionRefused" in ran(closed, code).stderr
    assert ran(closed, "import os; print(sorted(os.listdir('/sys/class/net')) if os.path.exists('/sys') else [])").stdout == "[]\n"


def test_a_fork_bomb_ends_at_the_number_of_processes(closed: Sandbox) -> None:
    code = "import os, time\nn = 0\ntry:\n  while True:\n    os.fork() or time.sleep(60); n += 1\nexcept OSError: print(n)"
    found = ran(closed, code)
    assert found.ok and int(found.stdout) <= 12, found


def test_it_sees_and_ends_no_process_but_its_own(closed: Sandbox) -> None:
    code = f"""
import os, signal
print(len([name for name in os.listdir('/proc') if name.isdigit()]))
for pid in ({os.getpid()}, {os.getppid()}):
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        continue
    raise SystemExit(f'{{pid}} was there')
"""
    found = ran(closed, code)
    assert found.ok and int(found.stdout) <= 4, found


def test_it_has_no_rights_and_can_get_none(closed: Sandbox) -> None:
    code = """
import os
status = open('/proc/self/status').read()
assert 'CapEff:\\t0000000000000000' in status and 'NoNewPrivs:\\t1' in status, status
for attempt in (lambda: os.setuid(0), lambda: os.chroot('.'), lambda: os.sethostname(b'x') if hasattr(os, 'sethostname') else os.setuid(0)):
    try:
        attempt()
    except OSError:
        continue
    raise SystemExit('a right')
assert os.getuid() != 0
"""
    found = ran(closed, code)
    assert found.ok, found


def test_what_it_may_fill_is_bounded_also_in_memory(closed: Sandbox) -> None:
    code = """
import os
for folder in ('.', '/tmp', '/dev/shm'):
    written = 0
    try:
        for n in range(8):
            with open(f'{folder}/{n}', 'wb') as file:
                written += file.write(b'0' * 2**20)
    except OSError:
        pass
    assert written <= 4 * 2**20, (folder, written)
"""
    found = ran(closed, code)
    assert found.ok, found


# --- Where there is none ----------------------------------------------------------------------------------------------


def test_a_machine_that_cannot_isolate_refuses_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"not installed: install bubblewrap .*or say that they can be trusted"):
        made()
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'No permissions to create a new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    with pytest.raises(SandboxUnavailable, match=r"cannot isolate here \(No permissions to create a new namespace\)"):
        made()


def test_a_class_of_ones_own_is_called_with_the_section_and_asked() -> None:
    with pytest.raises(ConfigError, match="has no 'Remote'"):
        made(kind="midflight.rewards:Remote")
    with pytest.raises(ConfigError, match="my_sandbox:Remote"):
        made(kind="podman")


def running(mark: str) -> bool:
    """Whether a process has this word. What was ended a moment ago may still be there for one."""
    until = time.monotonic() + 1
    while any(mark in words for words in commands()):
        if time.monotonic() > until:
            return True
        time.sleep(0.02)
    return False


def commands() -> list[str]:
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(process.read_text())
        except OSError:
            continue
    return found
