"""The ranks that share a step: how processes meet, and this process's place among them."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

SIOCGIFADDR = 0x8915
"""The call that asks Linux for the address of an interface. It takes and returns a `struct ifreq`,
in which the address begins at byte 20.
"""
PATIENCE = timedelta(days=7)
"""A rank may wait this long for another one, which may be at its warm start. The death of a rank is
noticed at once, by its connection.
"""


def backend_of(device: str) -> str:
    """The backend of ranks that compute on this device. Tensors on a GPU go by NCCL, tensors on the
    CPU by gloo, through the same calls.
    """
    kind = torch.device(device).type
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:nccl"


def join(
    meeting: str,
    *,
    host: str,
    rank: int,
    size: int,
    device: str = "cpu",
    listening_fd: int | None = None,
) -> None:
    """Makes this process one of `size`, on any machines. Waits until all have come.

    They meet at `meeting`, which is `host:port` of the first one. The first one brings the
    listening socket, and listens there only. `host` is the address at which the others reach this
    one: gloo takes that address's interface, unless `GLOO_SOCKET_IFNAME` names one. Nothing is
    encrypted.
    """
    if torch.device(device).type == "cuda":
        # It is GPU 0 where a process sees only its own.
        torch.cuda.set_device(rank % torch.cuda.device_count())
    # Without an interface gloo takes the address that this machine's name leads to.
    interface = interface_of(host)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    at, _, port = meeting.rpartition(":")
    is_first = rank == 0
    store = TCPStore(
        at.strip("[]"),
        int(port),
        is_master=is_first,
        timeout=PATIENCE,
        wait_for_workers=False,
        master_listen_fd=listening_fd,
    )
    dist.init_process_group(
        backend_of(device), store=store, rank=rank, world_size=size, timeout=PATIENCE
    )


def own_device(device: str) -> torch.device:
    """The device of this rank, which `join` has chosen if it is one of several GPUs."""
    found = torch.device(device)
    if str(found) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return found


def interface_of(host: str) -> str | None:
    """Name of this machine's network interface that has the address, or None if there is none, or
    the system does not tell (Linux does).
    """
    family, _, _, _, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0]
    if sys.platform != "linux":
        return None
    packed = socket.inet_pton(family, str(address))
    if family == socket.AF_INET6:
        return _interface_of_ipv6(packed)
    return _interface_of_ipv4(packed)


def _interface_of_ipv6(packed: bytes) -> str | None:
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        if line.startswith(packed.hex()):
            return line.split()[-1]
    return None


def _interface_of_ipv4(packed: bytes) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no address
                request = name.encode().ljust(256, b"\0")
                answer = fcntl.ioctl(asking, SIOCGIFADDR, request)
                if answer[20:24] == packed:
                    return name
    return None


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among those that train together. Every method is a collective: all ranks
    call it, in the same order.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def joined(cls) -> Ranks:
        """This process's place in torch's default process group; a single rank if there is none."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sums in place over the ranks, and returns the same tensor. Arrays that each rank filled
        in part, and left 0 elsewhere, become whole.
        """
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def largest(self, value: int) -> int:
        """The largest of the values that the ranks give."""
        if self.size == 1:
            return value
        found = torch.tensor(value)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def from_first(self, told: bytes) -> bytes:
        """The bytes that the first rank gives. Those of the others do not count."""
        if self.size == 1:
            return told
        length = torch.tensor([len(told)])
        dist.broadcast(length, 0)
        found = torch.zeros(int(length), dtype=torch.uint8)
        if self.is_first:
            found = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        dist.broadcast(found, 0)
        return found.numpy().tobytes()
