"""The trainer's end of a version that the workers of its machine read on its device (CUDA IPC). The
trainer copies one part after the other into a bucket, which all workers have opened, and each says
when it has read it.

A worker meets the trainer by a connection. It closes that after it has closed the bucket, and its
death closes it too: so an end of a connection means that nobody reads there any more.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from midflight.types import BucketHandle
from midflight.weights import device_handles
from midflight.weights.device_handles import GivenBucket
from midflight.weights.transports.process_group import GroupBroken
from midflight.weights.transports.rendezvous import MAX_LINE, Join

READ = b"\1"
"""The answer of a worker that has read a part."""
LENGTH_BYTES = 8
"""The trainer's word that a part is there: its length."""


class BucketsRefused(GroupBroken):
    """Workers cannot open the bucket. `why` has the reason of each, by its rank."""

    def __init__(self, why: dict[int, str]) -> None:
        super().__init__("; ".join(why.values()))
        self.why = why


class Arrived(msgspec.Struct, frozen=True):
    """The first line of a worker: its rank in the group, and why it cannot open the bucket."""

    group: str
    rank: int
    refused: str = ""


_arrived = msgspec.json.Decoder(Arrived)


class GivenBuckets:
    """The buckets of this process. One is used again when nobody has it open any more. Usually there
    is one; a worker that stopped in mid-version keeps another.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """Raises `HandleRefused` if the device gives none."""
        self._device = device
        self._num_bytes = num_bytes
        self._free = [device_handles.given_bucket(device, num_bytes)]
        self._open: list[tuple[GivenBucket, list[socket.socket]]] = []
        """Buckets that were left while some worker had them open."""

    def take(self) -> GivenBucket:
        """A bucket that nobody has open. Raises `GroupBroken` if the device has no room for another."""
        self._collect()
        if self._free:
            return self._free.pop()
        try:
            return device_handles.given_bucket(self._device, self._num_bytes)
        except device_handles.HandleRefused as refused:
            raise GroupBroken(f"a stopped worker has the bucket open, and {refused}") from refused

    def leave(self, bucket: GivenBucket, readers: Sequence[socket.socket]) -> None:
        """Gives a bucket back, which is used again when all `readers` have closed their ends."""
        self._open.append((bucket, list(readers)))
        self._collect()

    def describe(self, bucket: GivenBucket) -> BucketHandle:
        return BucketHandle(
            bucket.handle,
            device_handles.device_name(self._device),
            device_handles.machine(),
        )

    def free(self) -> None:
        """Gives the memory back of all that nobody has open. What is open ends with this process."""
        self._collect()
        for bucket in self._free:
            bucket.free()
        self._free.clear()

    def _collect(self) -> None:
        waiting = self._open
        self._open = []
        for bucket, readers in waiting:
            left = [reader for reader in readers if not _has_ended(reader)]
            if left:
                self._open.append((bucket, left))
            elif self._free:
                bucket.free()
            else:
                self._free.append(bucket)


def _has_ended(reader: socket.socket) -> bool:
    """True if the other end of a connection is closed, which closes ours."""
    reader.setblocking(False)
    try:
        while reader.recv(MAX_LINE):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    reader.close()
    return True


class HandleGroup:
    """The trainer, and the workers that have opened its bucket. It is for one version: then all of
    them close it.
    """

    def __init__(
        self,
        terms: Join,
        listener: socket.socket,
        bucket: GivenBucket,
        leave: Callable[[GivenBucket, Sequence[socket.socket]], None],
    ) -> None:
        """Waits until all workers have opened the bucket, until one says that it cannot, or for the
        deadline. `leave` gets the bucket back.
        """
        self.terms = terms
        self._bucket: GivenBucket | None = bucket
        self._leave = leave
        self._readers: list[socket.socket] = []
        try:
            with listener:
                self._meet(listener)
        except BaseException:
            self.close()
            raise

    def broadcast(self, part: Tensor) -> None:
        """Returns when each worker has its copy of the part, at most a bucket. It fails at once when
        a worker dies, and by the deadline when one stops.
        """
        if self._bucket is None:
            raise GroupBroken("the group has ended")
        try:
            self._bucket.write(part)
            for reader in self._readers:
                reader.sendall(part.nbytes.to_bytes(LENGTH_BYTES, "little"))
            for reader in self._readers:
                if reader.recv(1) != READ:
                    raise GroupBroken("a worker died, or gave up")
        except (GroupBroken, OSError, RuntimeError, device_handles.HandleRefused) as error:
            self.close()
            raise GroupBroken(str(error).partition("\n")[0]) from error

    def close(self) -> None:
        """Says to all workers that nothing more comes."""
        if self._bucket is None:
            return
        for reader in self._readers:
            with contextlib.suppress(OSError):
                reader.shutdown(socket.SHUT_WR)
        self._leave(self._bucket, self._readers)
        self._bucket = None

    def _meet(self, listener: socket.socket) -> None:
        late = time.monotonic() + self.terms.deadline_seconds
        refused: dict[int, str] = {}
        arrived = set[int]()
        while len(arrived) < self.terms.world - 1:
            listener.settimeout(max(0.001, late - time.monotonic()))
            try:
                reader, _ = listener.accept()
            except OSError as error:
                raise GroupBroken(f"a worker did not come to open the bucket: {error}") from error
            said = _first_line(reader, self.terms)
            if said is None:
                reader.close()
                continue
            self._readers.append(reader)
            arrived.add(said.rank)
            if said.refused:
                refused[said.rank] = said.refused
        if refused:
            raise BucketsRefused(refused)


def _first_line(reader: socket.socket, terms: Join) -> Arrived | None:
    """Reads the first line that a worker sends. `None` if it comes from no worker of this group."""
    reader.settimeout(terms.deadline_seconds)
    with contextlib.suppress(OSError, msgspec.MsgspecError), reader.makefile("rb") as lines:
        said = _arrived.decode(lines.readline(MAX_LINE))
        if said.group == terms.group:
            return said
    return None
