"""Several machines on this one. Each has a network, a /dev/shm, a /tmp, a host name, processes and a clock of its own, and shares one
folder with the others. Linux only; root, or what stands for it, makes them.

    with network(folder) as made:
        head, other = made.boot(), made.boot()
        head.run("ray", "start", "--head", ...)
        other.power_off()

They die like machines: who loses power says nothing any more, so its peers see no connection close; who is unplugged lives on and sees the
same of the others. Their CLOCK_MONOTONIC are days apart, and each has the Debian habit of calling itself 127.0.1.1. No name server is
there: the question is refused at once, where one that does not answer would cost seconds.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

BOOT = """set -e
mount -t tmpfs -o size=4g tmpfs /dev/shm
mount -t tmpfs -o size=1m tmpfs /mnt
for folder in $SHARED; do mkdir -p /mnt/$folder && mount --bind $folder /mnt/$folder; done
mount -t tmpfs -o size=4g tmpfs /tmp
for folder in $SHARED; do mkdir -p $folder && mount --move /mnt/$folder $folder; done
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' $NAME > /mnt/hosts
mount --bind /mnt/hosts /etc/hosts
echo nameserver 127.0.0.1 > /mnt/resolv.conf
mount --bind /mnt/resolv.conf /etc/resolv.conf
hostname $NAME
ip link set lo up
echo up
exec sleep infinity
"""
ROOT = Path(__file__).parents[2]
HERE = tuple(path for path in (ROOT, Path(sys.prefix)) if Path("/tmp") in path.parents and ROOT not in path.parents)
"""This checkout and its environment, which every machine has: where they lie below /tmp they are shown there."""
SPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--time")
DAY = 86_400
MAX_MACHINES = 200
BURST = 32 * 1024
"""Bytes that a slow link lets through at once, when it has rested."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@functools.cache
def missing() -> str | None:
    """Why there can be no machines here, as a sentence; None where there can."""
    if sys.platform != "linux":
        return "machines are made of namespaces, which only Linux has"
    for program in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is not here (iproute2 and util-linux have it)"
    tried = subprocess.run(["unshare", *SPACES, "--fork", "--mount-proc", "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"this user may not make namespaces ({tried.stderr.strip()}): run as root, in a container with --privileged"
    name = f"mf{secrets.token_hex(3)}"
    tried = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"this user may not make a bridge ({tried.stderr.strip()}): run as root, in a container with --privileged"
    ip("link", "del", name)
    return None


class Machine:
    """One that is up. `address` is its own in the network; `shared` are folders that it sees."""

    def __init__(self, name: str, *, address: str, gateway: str, link: str, bridge: str, shared: tuple[Path, ...], uptime: int) -> None:
        self.name, self.address, self.link = name, address, link
        ages = ["--monotonic", str(uptime), "--boottime", str(uptime)]
        self._first = subprocess.Popen(
            ["unshare", *SPACES, "--fork", "--kill-child", "--mount-proc", *ages, "bash", "-c", BOOT],
            stdout=subprocess.PIPE,
            env={**os.environ, "NAME": name, "SHARED": " ".join(map(str, (*shared, *HERE)))},
            preexec_fn=die_with_parent,
        )
        assert self._first.stdout is not None
        if self._first.stdout.readline() != b"up\n":
            raise RuntimeError(f"{name} did not come up")
        self.pid = int(Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split()[0])
        """Of its first process, as this machine numbers them."""
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        ip("link", "set", link, "master", bridge, "up")
        for words in (f"addr add {address}/24 dev eth0", "link set eth0 up", f"route add default via {gateway}"):
            self.run("ip", *words.split())

    @property
    def lives(self) -> bool:
        return self._first.poll() is None

    def command(self, *argv: str) -> list[str]:
        """Of this machine's, which runs `argv` there, in the same folder."""
        return ["nsenter", "--target", str(self.pid), *SPACES, f"--wd={Path.cwd()}", "--", *argv]

    def run(self, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Waits for its end. `CalledProcessError` where it fails, unless `check` is false."""
        return subprocess.run(self.command(*argv), **{"check": True, "capture_output": True, "text": True, **options})

    def start(self, *argv: str, **options: Any) -> subprocess.Popen[Any]:
        """It ends with the machine, and with this process."""
        return subprocess.Popen(self.command(*argv), preexec_fn=die_with_parent, **options)

    def processes(self) -> dict[int, str]:
        """Command lines of its processes, by their numbers on this machine."""
        space, found = Path(f"/proc/{self.pid}/ns/pid").readlink(), dict[int, str]()
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if folder.name.isdigit() and (folder / "ns" / "pid").readlink() == space:
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    # --- What happens to machines ------------------------------------------------------------------------------------

    def power_off(self) -> None:
        """Nothing that it would still say goes out: its cable is cut first."""
        with suppress(subprocess.CalledProcessError):
            self.unplug()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._first.wait(30)

    def unplug(self) -> None:
        """It lives on; nothing arrives, and nobody is told."""
        ip("link", "set", self.link, "down")

    def plug(self) -> None:
        ip("link", "set", self.link, "up")

    def slow(self, megabits: float) -> None:
        """What it sends, and what is sent to it, goes at so many a second from now on."""
        shape = f"root tbf rate {megabits}mbit burst {BURST} latency 400ms".split()
        subprocess.run(["tc", "qdisc", "replace", "dev", self.link, *shape], check=True)
        self.run("tc", "qdisc", "replace", "dev", "eth0", *shape)

    def fast(self) -> None:
        """As it was at first."""
        subprocess.run(["tc", "qdisc", "del", "dev", self.link, "root"], check=True)
        self.run("tc", "qdisc", "del", "dev", "eth0", "root")


class Network:
    """A switch, and the machines that hang on it."""

    def __init__(self, shared: Path) -> None:
        """`shared` is seen by every machine, under its own name; /tmp is not, but for that."""
        self.shared, key = shared, secrets.token_hex(2)
        self._key, self._bridge = key, f"mf{key}"
        self._net = f"10.{64 + int(key[:2], 16) % 64}.{int(key[2:], 16)}"
        self._numbers = itertools.count(1)
        self.machines: list[Machine] = []
        ip("link", "add", self._bridge, "type", "bridge")
        ip("addr", "add", f"{self._net}.254/24", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")

    def boot(self, *, shares: bool = True) -> Machine:
        """One more. Each has been up for some days longer than the one before. `shares`: it sees the shared folder."""
        number = next(self._numbers)
        assert number < MAX_MACHINES
        made = Machine(
            f"m{number}-{self._key}",
            address=f"{self._net}.{number}",
            gateway=f"{self._net}.254",
            link=f"mf{self._key}-{number}",
            bridge=self._bridge,
            shared=(self.shared,) if shares else (),
            uptime=number * 3 * DAY,
        )
        self.machines.append(made)
        return made

    def close(self) -> None:
        """Nothing of it stays."""
        for machine in self.machines:
            machine.power_off()
            with suppress(subprocess.CalledProcessError):  # the kernel takes a link when it takes the space of its other end, some day
                ip("link", "del", machine.link)
        ip("link", "del", self._bridge)


@contextmanager
def network(shared: Path) -> Generator[Network]:
    made = Network(shared)
    try:
        yield made
    finally:
        made.close()
