"""A process group of its own beside whatever torch's default group is: engines' workers have a default group for themselves."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from midflight.weights.transports.rendezvous import Join

T = TypeVar("T")

NCCL_LOOK_SECONDS = 0.0005
"""NCCL has no event that a thread could wait on with a deadline."""


class GroupBroken(Exception):
    """A member died, stopped or came too late. The group is of no use any more; a new one may be made at once."""


class Group:
    """One member's end. Every wait ends by the deadline in `terms`, or at once when a peer's connection closes.

    A peer that is killed closes its connections, so gloo fails within milliseconds; one that is stopped or cut off is found by
    the deadline, and one that dies while the group is made within gloo's own five seconds, if those are longer. gloo waits
    without the interpreter lock. To drop a group on which nothing is in progress takes milliseconds.
    """

    def __init__(self, terms: Join, store: TCPStore, *, interface: str) -> None:
        """Waits until all members are here. `interface` is the address of this machine that the others reach it by."""
        self.terms = terms
        make = _nccl if terms.backend == "nccl" else _gloo
        try:
            self._group: Any = make(terms, PrefixStore(terms.group, store), interface)
        except RuntimeError as error:
            raise GroupBroken(_first_line(error)) from error
        self._store: TCPStore | None = store  # the group's connections are made through it: it lives as long
        self._staged: Tensor | None
        self._staged = torch.empty(terms.bucket_bytes, dtype=torch.uint8, device="cuda") if terms.backend == "nccl" else None

    def broadcast(self, part: Tensor) -> None:
        """Rank 0's bytes, at most a bucket, into everybody's `part`: uint8 in this process's own memory."""
        try:
            if self._staged is None:
                self._start(part).wait()
            else:
                self._through_device(part, self._staged[: part.numel()])
        except (GroupBroken, RuntimeError) as error:
            self.close()
            raise GroupBroken(_first_line(error)) from error

    def close(self) -> None:
        """Closes the connections, so that the others need not wait for their deadline: a traceback may hold this object for long."""
        self._group = self._store = self._staged = None

    def _start(self, part: Tensor) -> Any:
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return self._group.broadcast([part], options)

    def _through_device(self, part: Tensor, staged: Tensor) -> None:
        if self.terms.rank == 0:
            staged.copy_(part)
        work, late = self._start(staged), time.monotonic() + self.terms.deadline_seconds
        while not work.is_completed():
            if time.monotonic() > late:
                self._group.abort()
                raise GroupBroken(f"NCCL did not finish a bucket within {self.terms.deadline_seconds:g} s")
            time.sleep(NCCL_LOOK_SECONDS)
        work.wait()
        if self.terms.rank != 0:
            part.copy_(staged)


def listen(host: str) -> socket.socket:
    """On a free port of this address only."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def serve_store(host: str) -> TCPStore:
    """A new store for one group, on this address only; left to itself it would listen on all."""
    listener = listen(host)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def join_store(host: str, terms: Join) -> TCPStore:
    """The store of the group in `terms`; `GroupBroken` when it does not answer by the deadline.

    In a thread of its own, for a client whose server was stopped waits for ever for the greeting, whatever its timeout.
    """
    seconds = timedelta(seconds=terms.deadline_seconds)
    return _within(terms.deadline_seconds, lambda: TCPStore(host, terms.port, timeout=seconds, wait_for_workers=False))


def _within(seconds: float, make: Callable[[], T]) -> T:
    made: list[T] = []
    failed: list[str] = ["the publisher's store did not answer"]

    def run() -> None:
        try:
            made.append(make())
        except RuntimeError as error:
            failed.append(_first_line(error))

    thread = threading.Thread(target=run, name="weights-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if not made:
        raise GroupBroken(failed[-1])
    return made[0]


def _gloo(terms: Join, store: PrefixStore, interface: str) -> Any:
    """The device names the interface: without one gloo takes the address that this machine's name resolves to."""
    options = cast(Any, ProcessGroupGloo)._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=interface)]
    options._timeout = timedelta(seconds=terms.deadline_seconds)
    return cast(Any, ProcessGroupGloo)(store, terms.rank, terms.world, options)


def _nccl(terms: Join, store: PrefixStore, interface: str) -> Any:
    """Its watchdog ends the process when the group's own timeout passes, so that is longer than ours, after which we abort."""
    if not torch.cuda.is_available():
        raise GroupBroken("the publisher sends by NCCL and this process has no GPU; publish with the gloo backend")
    from torch.distributed import ProcessGroupNCCL

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=3 * terms.deadline_seconds)
    return ProcessGroupNCCL(store, terms.rank, terms.world, options)


def _first_line(error: Exception) -> str:
    """Native errors carry their stack."""
    return str(error).partition("\n")[0]
