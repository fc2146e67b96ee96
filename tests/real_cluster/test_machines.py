"""The machines of these tests: they have apart what machines have, and die like them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .machines import Network, missing, network

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
ASK = "import socket, sys; s = socket.create_connection((sys.argv[1], 8123), 3); print(s.recv(5).decode())"
GREET = """
import socket, sys, time
with socket.create_server((sys.argv[1], 8123)) as server:
    print("up", flush=True)
    while True:
        asked, _ = server.accept()
        asked.sendall(b"hello")
        held = asked
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(tmp_path_factory.mktemp("shared")) as net:
        yield net


def test_machines_share_a_network_and_one_folder_and_nothing_else(made: Network) -> None:
    a, b, c = made.boot(), made.boot(), made.boot(shares=False)
    (made.shared / "seen").write_text("by all")
    assert a.run("cat", str(made.shared / "seen")).stdout == b.run("cat", str(made.shared / "seen")).stdout == "by all"
    assert c.run("ls", str(made.shared / "seen"), check=False).returncode != 0
    a.run("touch", "/dev/shm/mine", "/tmp/mine")
    for place in ("/dev/shm/mine", "/tmp/mine"):
        assert b.run("ls", place, check=False).returncode != 0 and not Path(place).exists()
    assert a.run("hostname").stdout.strip() == a.name != b.name
    assert socket.gethostname() not in (a.name, b.name)
    clocks = [float(machine.run(sys.executable, "-S", "-c", "import time; print(time.monotonic())").stdout) for machine in (a, b)]
    assert 2 * 86_400 < clocks[1] - clocks[0] < 4 * 86_400
    server = a.start(sys.executable, "-S", "-c", GREET, a.address, stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline() == b"up\n"
    assert b.run(sys.executable, "-S", "-c", ASK, a.address).stdout == "hello\n"
    assert sum("8123" in line for line in a.processes().values()) == 1 and not any("8123" in line for line in b.processes().values())


def test_who_loses_power_says_nothing_and_who_is_unplugged_lives_on(made: Network) -> None:
    a = made.boot()
    server = a.start(sys.executable, "-S", "-c", GREET, a.address, stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline() == b"up\n"
    with socket.create_connection((a.address, 8123), 3) as asking:
        asking.settimeout(1)
        assert asking.recv(5) == b"hello"
        a.unplug()
        assert server.poll() is None and a.lives
        with pytest.raises(TimeoutError):
            asking.recv(1)
        a.plug()
        a.power_off()
        with pytest.raises(TimeoutError):
            asking.recv(1)
    server.wait(10)
    assert not a.lives


SEND = "import socket, sys; s = socket.create_server((sys.argv[1], 8124)); print('up', flush=True); s.accept()[0].sendall(bytes(3_000_000))"
TAKE = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 8124), 10) as asking:
    number, began = len(asking.recv(1)), time.monotonic()
    while received := asking.recv(65536):
        number += len(received)
print(number, time.monotonic() - began)
"""


def test_a_slow_link_carries_so_much_and_no_more(made: Network) -> None:
    """3 MB at 10 Mbit/s take 2.4 s from the first byte to the last, but for what a rested link lets through at once; else a small part of that."""
    a, b = made.boot(), made.boot()
    took: list[float] = []
    for slow in (True, False):
        a.slow(10) if slow else a.fast()
        sender = a.start(sys.executable, "-S", "-c", SEND, a.address, stdout=subprocess.PIPE)
        assert sender.stdout is not None and sender.stdout.readline() == b"up\n"
        number, seconds = b.run(sys.executable, "-S", "-c", TAKE, a.address).stdout.split()
        assert number == "3000000"
        took.append(float(seconds))
        sender.wait(10)
    assert took[0] > 2.2 > took[1]


RANK = """
import sys, torch, torch.distributed as dist
from midflight.trainer.model.ranks import join
from midflight.wire.server import listen
own, first, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
fd = listen(own, 29511).detach() if rank == 0 else None
join(f"{first}:29511", host=own, rank=rank, size=2, listening_fd=fd)
values = torch.full((3 << 20,), rank + 1.0)
dist.all_reduce(values)
print(values[0].item(), values.sum().item())
dist.destroy_process_group()
"""


def test_trainer_ranks_on_two_machines_meet_though_each_calls_itself_loopback(made: Network) -> None:
    a, b = made.boot(), made.boot()
    environ = {**{k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}, "OMP_NUM_THREADS": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environ}
    ranks = [m.start(sys.executable, "-c", RANK, m.address, a.address, str(i), **options) for i, m in enumerate((a, b))]
    for rank in ranks:
        said, errors = rank.communicate(timeout=600)
        assert said.split() == ["3.0", str(3.0 * (3 << 20))], errors
