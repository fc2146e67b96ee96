"""Ranks find each other at an address of the first one's machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from midflight.trainer.model import ranks
from midflight.trainer.model.ranks import backend_of, interface_of, join
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


def test_the_device_says_how_ranks_talk_and_all_else_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    begun: list[tuple[str, int]] = []
    monkeypatch.setattr(ranks, "TCPStore", lambda *args, **kwargs: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, *, rank, **kwargs: begun.append((backend, rank)))
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each rank sees its own alone
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for device in ("cpu", "cuda"):
        join("127.0.0.1:1", host="127.0.0.1", rank=3, size=4, device=device)
    assert begun == [("gloo", 3), ("cpu:gloo,cuda:nccl", 3)] and chosen == [0]
    assert backend_of("cuda:1") == "cpu:gloo,cuda:nccl"
