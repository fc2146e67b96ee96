"""Ranks find each other at an address of the first one's machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from midflight.trainer.model.policy import interface_of, join
from midflight.wire.server import listen


def test_the_interface_of_an_address_is_found_and_a_strange_one_has_none() -> None:
    assert interface_of("127.0.0.1") == interface_of("localhost") == "lo"
    assert interface_of("192.0.2.1") is None
    if Path("/proc/net/if_inet6").exists():
        assert interface_of("::1") in ("lo", None)


def test_ranks_meet_where_the_first_one_listens_and_talk_over_that_addresss_interface() -> None:
    with listen("127.0.0.1", 0) as meeting:
        start_processes(_sum, args=(meeting,), nprocs=2, start_method="fork")


def _sum(rank: int, meeting: socket.socket) -> None:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    torch.set_num_threads(1)
    host, port = meeting.getsockname()
    join(f"{host}:{port}", host=host, rank=rank, size=2, listening_fd=meeting.fileno() if rank == 0 else None)
    try:
        values = torch.tensor([rank + 1.0])
        dist.all_reduce(values)
        assert values.tolist() == [3.0] and os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    finally:
        dist.destroy_process_group()
