"""The process group in which both ends of a broadcast meet, and the receiver above it. The receiver
asks the publisher for a version, meets it in a group, receives and verifies.

The group exists beside torch's default group, which engines' workers have for themselves.
"""

import base64
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar, cast

import msgspec
import torch
from torch import Tensor
from torch.cuda import nccl
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from midflight.errors import EngineUnavailable, WeightsCorrupt
from midflight.types import WeightManifest
from midflight.weights.manifest import extent, repacked, set_aside, views
from midflight.weights.transports.device_versions import DEVICE_PREFIX, verify_of_device
from midflight.weights.transports.file_receiver import verify
from midflight.weights.transports.rendezvous import (
    MAX_LINE,
    Address,
    Answer,
    Ask,
    Join,
    KeepGroup,
    Refused,
    buckets,
    line,
    read_answer,
)

T = TypeVar("T")

NCCL_LOOK_SECONDS = 0.0005
"""NCCL has no event that a thread could wait on with a deadline."""


class GroupBroken(Exception):
    """A member died, stopped or came too late. The group is useless from then on, and a new one may
    be made at once.
    """


class BroadcastGroup:
    """One member's end. Every wait ends by the deadline in `terms`, or at once when a peer's
    connection closes.

    A peer that is killed closes its connections, so gloo fails within milliseconds. A peer that is
    stopped or cut off is found by the deadline. A peer that dies while the group is made is found
    within gloo's own five seconds, if those are longer. gloo waits without the interpreter lock.
    Dropping a group on which nothing is in progress takes milliseconds.
    """

    def __init__(self, terms: Join, store: TCPStore, *, interface: str) -> None:
        """Waits until all members are here. `interface` is the address of this machine by which the
        others reach it.
        """
        self.terms = terms
        make = _nccl if terms.backend == "nccl" else _gloo
        if terms.nccl_id:
            make = _by_nccl_id
        try:
            self._group: Any = make(terms, _named(terms, store), interface)
        except RuntimeError as error:
            raise GroupBroken(_first_line(error)) from error
        # The store lives as long as the group, whose connections are made through it.
        self._store: TCPStore | None = store

    def broadcast(self, part: Tensor) -> None:
        """Copies rank 0's bytes, at most a bucket, into the `part` of every member: uint8 in this
        process's own memory, or on its device if the terms say so.
        """
        try:
            # No name here for the work: a traceback would keep it, and with it the connections.
            if self.terms.backend == "nccl":
                self._poll(part)
            else:
                self._start(part).wait()
        except (GroupBroken, RuntimeError) as error:
            self.close()
            raise GroupBroken(_first_line(error)) from error

    def close(self) -> None:
        """Closes the connections, so that the others need not wait for their deadline. Deleting the
        group would not do: a traceback may keep it alive.
        """
        self._group = None
        self._store = None

    def _start(self, part: Tensor) -> Any:
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        return self._group.broadcast([part], options)

    def _poll(self, part: Tensor) -> None:
        """Looks at NCCL's work until it is done or late."""
        work = self._start(part)
        late = time.monotonic() + self.terms.deadline_seconds
        while not work.is_completed():
            if time.monotonic() > late:
                self._group.abort()
                raise GroupBroken(
                    f"NCCL did not finish a bucket within {self.terms.deadline_seconds:g} s"
                )
            time.sleep(NCCL_LOOK_SECONDS)
        work.wait()


def listen(host: str) -> socket.socket:
    """Listens on a free port of this address only."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


def serve_store(host: str) -> TCPStore:
    """A new store for one group. It listens on this address only; by default it would listen on all
    addresses.
    """
    listener = listen(host)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join_store(host: str, terms: Join) -> TCPStore:
    """The store of the group in `terms`. Raises `GroupBroken` if it does not answer by the
    deadline.

    It is made in a thread of its own, because a client whose server was stopped waits for the
    greeting for ever, even with a timeout.
    """
    seconds = timedelta(seconds=terms.deadline_seconds)
    return _within(
        terms.deadline_seconds,
        lambda: TCPStore(host, terms.port, timeout=seconds, wait_for_workers=False),
    )


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


def _named(terms: Join, store: TCPStore) -> PrefixStore:
    """The keys by which members meet. A server's own engine has those of
    `torch.distributed.new_group`: the group's name twice, and the device's kind.
    """
    if terms.meets == "nccl_id":
        return PrefixStore(terms.meets, store)
    ours = PrefixStore(terms.group, store)
    if terms.meets == "plugin":
        return ours
    kind = "cuda" if terms.backend == "nccl" else "cpu"
    return PrefixStore(f"{kind}/", PrefixStore(f"{terms.group}/", ours))


def new_nccl_id() -> str:
    """A new id of NCCL in base64, by which members meet without a store."""
    made: bytes = cast(Any, nccl).unique_id()
    return base64.b64encode(made).decode()


class NcclById:
    """A communicator of NCCL alone, whose members know nothing of torch's groups. vLLM's engine
    meets so. Untested on a GPU.
    """

    def __init__(self, terms: Join) -> None:
        """Waits until all members are here."""
        self._nccl = cast(Any, nccl)
        made = base64.b64decode(terms.nccl_id)
        self._comm = self._nccl.init_rank(terms.world, made, terms.rank)
        # The first thing that vLLM's workers do.
        self._nccl.all_reduce([torch.zeros(1, device="cuda")], comms=[self._comm])
        torch.cuda.current_stream().synchronize()

    def broadcast(self, parts: list[Tensor], options: Any) -> "RecordedWork":
        self._nccl.broadcast(parts, options.rootRank, comms=[self._comm])
        return RecordedWork(torch.cuda.current_stream().record_event())

    def abort(self) -> None:
        """Nothing can end it: it is left as it is."""


class RecordedWork:
    """Work of which an event on a stream tells that it is over."""

    def __init__(self, event: Any) -> None:
        """`event`: of `torch.cuda`."""
        self._event = event

    def is_completed(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


def _by_nccl_id(terms: Join, store: PrefixStore, interface: str) -> NcclById:
    return _within(terms.deadline_seconds, lambda: NcclById(terms))


def _gloo(terms: Join, store: PrefixStore, interface: str) -> Any:
    """A group over gloo. Its device names the interface, because without one gloo takes the address
    that this machine's name resolves to.
    """
    options = cast(Any, ProcessGroupGloo)._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=interface)]
    options._timeout = timedelta(seconds=terms.deadline_seconds)
    return cast(Any, ProcessGroupGloo)(store, terms.rank, terms.world, options)


def _nccl(terms: Join, store: PrefixStore, interface: str) -> Any:
    """A group over NCCL. NCCL's watchdog ends the process when the group's own timeout passes. That
    timeout is longer than ours, after which the broadcast is aborted.
    """
    if not torch.cuda.is_available():
        raise GroupBroken(
            "the publisher sends by NCCL and this process has no GPU; publish with the gloo backend"
        )
    from torch.distributed import ProcessGroupNCCL

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=3 * terms.deadline_seconds)
    return ProcessGroupNCCL(store, terms.rank, terms.world, options)


def _first_line(error: Exception) -> str:
    """The first line of a native error, which carries its stack."""
    return str(error).partition("\n")[0]


ATTEMPTS = 2
"""A receiver that dies ends its group, and the others must not suffer for it, so they try again. A
second failure goes to the handover.
"""


class BroadcastReceiver:
    """Implements `ports.WeightReceiver`. It keeps its group for the next version, because making
    one takes time.

    Each rank of an engine with several is a receiver of its own. One `fetch` runs at a time, and
    another waits for it.
    """

    def __init__(self, *, threads: int = 1, answer_seconds: float = 60.0) -> None:
        """`answer_seconds` is the time that the publisher may be busy with the rounds before ours.
        A group's own deadlines come from it.
        """
        self._threads = threads
        self._answer_seconds = answer_seconds
        self._member = secrets.token_hex(8)
        self._group: BroadcastGroup | None = None
        self._one_at_a_time = threading.Lock()

    def fetch(self, manifest: WeightManifest) -> Mapping[str, memoryview]:
        """Bytes of each tensor by name. Raises `EngineUnavailable` if the publisher or the group is
        gone, by the deadlines at the latest.
        """
        specs = repacked(manifest.tensors)
        buffer = set_aside(specs)
        data = torch.frombuffer(buffer, dtype=torch.uint8)[: extent(specs)]
        with self._one_at_a_time:
            self._receive(manifest, data)
        copies = views(specs, buffer)
        if manifest.fingerprint.startswith(DEVICE_PREFIX):
            verify_of_device(manifest, copies)
        else:
            verify(manifest, copies, threads=self._threads)
        return copies

    def _receive(self, manifest: WeightManifest, data: Tensor) -> None:
        broken: GroupBroken | None = None
        for _ in range(ATTEMPTS):
            try:
                return self._once(manifest, data)
            except GroupBroken as error:
                self._group = None
                broken = error
        raise EngineUnavailable(
            f"fetching version {manifest.version}: the broadcast broke {ATTEMPTS} times "
            f"({broken}); see which other engine died and stage again, or raise "
            "weights.stage_seconds if the network is only slow."
        ) from broken

    def _once(self, manifest: WeightManifest, data: Tensor) -> None:
        try:
            address = Address.parse(manifest.location)
            with socket.create_connection(
                (address.host, address.port), timeout=self._answer_seconds
            ) as publisher:
                answer = self._ask(publisher, address, manifest)
                group = self._meet(answer, publisher, manifest)
                self._group = group
                for part in buckets(data.numel(), group.terms.bucket_bytes):
                    group.broadcast(data[part])
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._group = None
            raise EngineUnavailable(
                f"fetching version {manifest.version}: the publisher does not answer ({error}); "
                "publish the version again, or raise weights.stage_seconds if it is only slow."
            ) from error

    def _ask(self, publisher: socket.socket, address: Address, manifest: WeightManifest) -> Answer:
        """Waits for the other receivers that want this version, and for the rounds before."""
        ask = Ask(
            token=address.token,
            version=manifest.version,
            fingerprint=manifest.fingerprint,
            member=self._member,
            group=self._group.terms.group if self._group is not None else None,
            expected=manifest.receivers,
        )
        publisher.sendall(line(ask))
        with publisher.makefile("rb") as answers:
            return read_answer(answers.readline(MAX_LINE))

    def _meet(
        self, answer: Answer, publisher: socket.socket, manifest: WeightManifest
    ) -> BroadcastGroup:
        match answer:
            case Join():
                # The old group goes before the new one is made: it may hold sockets and memory.
                self._group = None
                store = join_store(publisher.getpeername()[0], answer)
                return BroadcastGroup(answer, store, interface=publisher.getsockname()[0])
            case KeepGroup() if self._group is not None:
                return self._group
            case Refused(reason):
                raise WeightsCorrupt(
                    f"fetching version {manifest.version}: {reason}; publish a version again."
                )
            case _:
                raise ValueError("it names a group that was never made")
