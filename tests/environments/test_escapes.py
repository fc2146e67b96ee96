"""Tries to get past the sandbox on this machine. None may. Each is run as root's sandbox and as another user's, with a control
group and without one.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.environments.escapes import ESCAPES, Escape
from tests.environments.test_sandboxes import made, running

from midflight.environments.sandboxes import bubblewrap, control_groups
from midflight.environments.sandboxes.port import PYTHON, ProgramResult
from midflight.environments.sandboxes.seccomp import ARCHITECTURES, DENIED, call_filter
from midflight.errors import SandboxUnavailable

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")
LIMITS = {"seconds": 60.0, "memory_mb": 192, "disk_mb": 4, "processes": 12}
DAEMON = "79.125"
HERE = [escape for escape in ESCAPES if platform.machine() in escape.machines]


WAYS = ("root", "user", "no_group")
TRIES = [(way, escape) for way in WAYS for escape in HERE if way != "no_group" or escape.limit]
"""Without a control group the limits are others, and all else is the same."""


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How the sandbox is made. A user that is not root gets a user namespace, here too."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "user" and os.geteuid() == 0:
            patch.setattr(bubblewrap.os, "geteuid", lambda: 1000)
        if request.param == "no_group":
            patch.setattr(control_groups, "found_hierarchies", lambda: None)
        if request.param == "root" and os.geteuid():
            pytest.skip("this is not root")
        yield request.param


class Machine:
    """What a program may try to reach: servers, files and processes of this machine."""

    def __init__(self, folder: Path) -> None:
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.udp.settimeout(0.05)
        self.file = socket.socket(socket.AF_UNIX)
        self.file.bind(str(folder / "socket"))
        self.file.listen()
        (folder / "socket").chmod(0o777)
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0midflight-{os.getpid()}")
        self.abstract.listen()
        self.secret = folder / "secret"
        self.secret.write_text("a secret")
        self.folder = folder

    def told(self, limits: dict[str, object]) -> str:
        machine = ARCHITECTURES[platform.machine()]
        return json.dumps(
            {
                "calls": {name: numbers[machine.column] for name, numbers in DENIED.items()},
                "clone": machine.clone,
                "ioctl": machine.ioctl,
                "memory": int(str(limits["memory_mb"])) * 2**20,
                "disk": int(str(limits["disk_mb"])) * 2**20,
                "processes": limits["processes"],
                "tcp": self.tcp.getsockname()[1],
                "udp": self.udp.getsockname()[1],
                "abstract": f"midflight-{os.getpid()}",
                "socket": str(self.folder / "socket"),
                "secret": str(self.secret),
                "home": str(Path.home()),
                "pid": os.getpid(),
                "parent": os.getppid(),
                "mark": "a mark in the environment",
                "daemon": DAEMON,
            }
        )

    def close(self) -> None:
        for each in (self.tcp, self.udp, self.file, self.abstract):
            each.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    folder = tmp_path / "m"
    folder.mkdir()
    found = Machine(folder)
    yield found
    found.close()


def ran(kind: str, escape: Escape, machine: Machine) -> ProgramResult:
    limits = LIMITS | escape.options
    return asyncio.run(made(kind=kind, **limits).python(escape.program, stdin=machine.told(limits)))


@pytest.mark.parametrize(("way", "escape"), TRIES, ids=[f"{way}-{escape.name}" for way, escape in TRIES], indirect=["way"])
def test_it_is_blocked(way: str, escape: Escape, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDFLIGHT_CONTROL_TOKEN", "a mark in the environment")
    found = ran("bubblewrap", escape, machine)
    assert "ESCAPED" not in found.stdout, f"{escape.attempt} {found}"
    if found.ended_by is not None:
        assert found.ended_by in escape.limit, f"{escape.attempt} {found}"
    else:
        assert "blocked" in found.stdout, f"{escape.attempt} {found}"
    assert not running(DAEMON), escape.attempt
    with pytest.raises(TimeoutError):
        machine.udp.recv(100)


@pytest.mark.skipif(os.geteuid() != 0, reason="outside a sandbox only root may do all this")
@pytest.mark.parametrize("escape", [escape for escape in HERE if escape.works_outside], ids=lambda escape: escape.name)
def test_outside_a_sandbox_the_same_program_gets_there(escape: Escape, machine: Machine) -> None:
    """So it tries what it says that it tries."""
    limits = LIMITS | escape.options
    command = ["unshare", "--ipc", *PYTHON]  # so that nothing of it is left on the machine
    files = {"main.py": escape.program}
    outside = made(kind="trusted", **limits)
    found = asyncio.run(outside.run(command, files=files, stdin=machine.told(limits)))
    assert "ESCAPED" in found.stdout, found


def test_there_are_forty_tries_and_more() -> None:
    assert len({escape.name for escape in ESCAPES}) == len(ESCAPES) >= 40
    assert all(escape.attempt.endswith(".") for escape in ESCAPES)


# --- The filter -------------------------------------------------------------------------------------------------------


def test_every_number_is_the_kernels() -> None:
    """libseccomp has a table of its own."""
    from ctypes import CDLL, c_uint32

    try:
        library = CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("libseccomp is not installed")
    for machine in ARCHITECTURES.values():
        others = {"clone": machine.clone, "ioctl": machine.ioctl, "socket": machine.socket}
        numbers = {name: found[machine.column] for name, found in DENIED.items()} | others
        for name, number in numbers.items():
            known = library.seccomp_syscall_resolve_name_arch(c_uint32(machine.audit), name.encode())
            assert known == number or (number is None and known < 0), (name, known, number)


def test_a_machine_whose_calls_are_not_known_is_refused() -> None:
    with pytest.raises(SandboxUnavailable, match=r"cannot filter system calls on riscv64, only on x86_64 and aarch64; name"):
        call_filter("riscv64")


def test_every_jump_of_the_filter_stays_within_it() -> None:
    """The kernel would refuse it, but only on its own kind of machine."""
    for name in ARCHITECTURES:
        words = call_filter(name)
        number = len(words) // 8
        assert number < 4096
        for at in range(number):
            code, then, otherwise = int.from_bytes(words[8 * at : 8 * at + 2], "little"), words[8 * at + 2], words[8 * at + 3]
            if code & 7 == 5:
                assert at + 1 + max(then, otherwise) < number


def test_ordinary_programs_work_in_it(way: str) -> None:
    code = """
import concurrent.futures, multiprocessing, os, subprocess, tempfile, socket, sqlite3, threading
def double(n): return 2 * n
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(double, [1, 2]))
    print(subprocess.run(["bash", "-c", "echo $((1 + 2)) | cat; cd /tmp && pwd"], capture_output=True, text=True).stdout.split())
    with tempfile.NamedTemporaryFile() as file, socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
        print(file.name.startswith("/tmp/"), len(os.urandom(3)), open("/dev/null").read() == "")
    print(sqlite3.connect("x.db").execute("select 1").fetchone(), os.getcwd(), multiprocessing.Semaphore(1).acquire())
    first, second = os.openpty(); print(os.ttyname(second).startswith("/dev/pts/") or os.ttyname(second))
"""
    found = asyncio.run(made(**LIMITS).python(code))
    assert found.ok, found
    assert found.stdout.splitlines()[:-1] == ["[2, 4]", "['3', '/tmp']", "True 3 True", "(1,) /sandbox/work True"], found


def test_numpy_and_a_compiler_work_in_it(way: str) -> None:
    found = asyncio.run(made(**LIMITS | {"memory_mb": 2048}).python("import numpy; a = numpy.ones((300, 300)); print(int((a @ a).sum()))"))
    assert found.stdout == f"{300**3}\n", found
    if shutil.which("gcc"):
        script = "printf '#include <stdio.h>\\nint main(){puts(\"hello\");}' > a.c && gcc a.c -o a && ./a"
        found = asyncio.run(made(**LIMITS | {"disk_mb": 64, "memory_mb": 1024}).run(["sh", "-c", script]))
        assert found.stdout == "hello\n", found
