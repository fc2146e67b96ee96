"""Publishing by broadcast: the trainer keeps the versions in its own memory, and engines on any
machine meet to receive them.

The service does that in a thread of its own: receivers come, ask for a version, meet in a group,
and get the bytes in one broadcast.
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from midflight.errors import ConfigError, RunFailed
from midflight.models.device_memory import give_back
from midflight.models.sizes import BUCKET_BYTES, fingerprint
from midflight.types import BucketHandle, Meeting, TensorSpec, Version, WeightManifest
from midflight.weights.device_digest import digests as device_digests
from midflight.weights.device_digest import lanes
from midflight.weights.device_handles import HandleRefused
from midflight.weights.manifest import MAX_HELD, extent, layout
from midflight.weights.transports import rendezvous
from midflight.weights.transports.buffers import StandingBuffers
from midflight.weights.transports.device_versions import (
    DeviceBuffer,
    device_fingerprint,
    fingerprint_of_each,
    tensor_bytes_of,
)
from midflight.weights.transports.handle_group import BucketsRefused, GivenBuckets, HandleGroup
from midflight.weights.transports.kinds import DIRECT
from midflight.weights.transports.process_group import (
    BroadcastGroup,
    GroupBroken,
    listen,
    new_nccl_id,
    serve_store,
)
from midflight.weights.transports.publisher import (
    Fill,
    Publisher,
    check_slot,
    copied,
    copy_into,
    named_shapes,
)
from midflight.weights.transports.rendezvous import (
    Address,
    Answer,
    Ask,
    Backend,
    Gathering,
    HandlesRefused,
    Join,
    KeepGroup,
    LastBucketSent,
    Refused,
    WaitingReceiver,
)
from midflight.wire.edge import same_token

T = TypeVar("T")
CPU = torch.device("cpu")
_log = logging.getLogger(__name__)

MAX_GROUPS = 4
"""Groups kept for the next version. Usually there is one. The others belong to members that ended
without notice, or that came late and will come late again.
"""


@dataclass(frozen=True, slots=True)
class GroupWay:
    """How the bytes of a round go."""

    backend: Backend
    on_device: bool
    """True if they lie on a device at both ends, and are hashed there."""


Group = BroadcastGroup | HandleGroup


def use_device(device: torch.device) -> None:
    """Makes the device that of this thread, which begins with the first one."""
    if str(device) != device.type:  # it has a number
        torch.get_device_module(device).set_device(device)


@contextlib.contextmanager
def own_stream(device: torch.device) -> Generator[None]:
    """Work in the block does not wait for that of other threads, such as a step of the trainer."""
    module = None if device == CPU else torch.get_device_module(device)
    if module is None or not hasattr(module, "Stream"):
        yield
        return
    with module.stream(module.Stream(device)):
        yield


class OutgoingVersion(Protocol):
    """A version to send. Its bytes do not change until its release."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def tensors(self) -> tuple[TensorSpec, ...]: ...
    @property
    def device(self) -> torch.device:
        """Where its buckets lie."""
        ...

    def parts(self, meets: Meeting, bucket_bytes: int) -> Generator[Tensor]:
        """The buckets to send, in order, as uint8: slices for our plugin, and whole tensors one
        after the other for a server's own engine. The caller closes it.
        """
        ...


@dataclass(frozen=True, slots=True)
class WholeVersion:
    """Implements `OutgoingVersion`: bytes that lie together."""

    data: Tensor
    fingerprint: str
    tensors: tuple[TensorSpec, ...]

    @property
    def device(self) -> torch.device:
        return self.data.device

    def parts(self, meets: Meeting, bucket_bytes: int) -> Generator[Tensor]:
        if meets == "plugin":
            for place in rendezvous.buckets(self.data.numel(), bucket_bytes):
                yield self.data[place]
            return
        for pack in rendezvous.packs(self.tensors, bucket_bytes):
            places = [slice(spec.offset, spec.offset + spec.num_bytes) for spec in pack]
            yield torch.cat([self.data[place] for place in places])


@dataclass(frozen=True, slots=True)
class VersionOfWeights:
    """Implements `OutgoingVersion`: tensors of the trainer, which stay as they are until it is
    withdrawn. Nothing of it is kept: buckets are made of the tensors when they are sent.
    """

    given: Mapping[str, Tensor]
    fill: Fill
    fingerprint: str
    tensors: tuple[TensorSpec, ...]
    device: torch.device

    def parts(self, meets: Meeting, bucket_bytes: int) -> Generator[Tensor]:
        if meets != "plugin":
            raise RuntimeError("a server's own engine takes no versions of a trainer in turns")
        waiting = [spec for spec in self.tensors if spec.num_bytes]
        begun: Tensor | None = None
        for place in rendezvous.buckets(extent(self.tensors), bucket_bytes):
            size = place.stop - place.start
            part = torch.zeros(size, dtype=torch.uint8, device=self.device)
            while waiting and waiting[0].offset < place.stop:
                spec = waiting[0]
                if begun is None:
                    begun = tensor_bytes_of(spec, self.given, self.fill, self.device)
                end = spec.offset + spec.num_bytes
                first = max(spec.offset, place.start)
                last = min(end, place.stop)
                stretch = begun[first - spec.offset : last - spec.offset]
                part[first - place.start : last - place.start].copy_(stretch)
                if end > place.stop:
                    break
                waiting.pop(0)
                begun = None
            yield part


class BroadcastService:
    """Serves one round after the other. In a round, receivers that want the same bytes form a group
    with the publisher, which broadcasts the bytes and closes the connections.

    | waits for | ended by |
    |---|---|
    | a receiver's question | its line, or `deadline_seconds` |
    | those who want the same bytes | as many as were told to come, or `quiet_seconds` without another |
    | all members in a new group | the last one, or `deadline_seconds` |
    | a bucket in everybody's hands | the last one, a peer's death at once, or `deadline_seconds` |

    An error in a round ends that round and its group only. Its receivers find the connection
    closed, and ask again.
    """

    def __init__(
        self,
        published: Mapping[Version, OutgoingVersion],
        gathering: Gathering,
        *,
        host: str,
        token: str,
        backend: Backend,
        bucket_bytes: int,
        deadline_seconds: float,
        device: torch.device = CPU,
        given: GivenBuckets | None = None,
    ) -> None:
        """`published` is read from the service's threads while the trainer's thread changes it. Bytes
        on `device` go to the workers of servers by `backend`, and to others from host memory by
        gloo. `given` has buckets of `device`, if the backend is `handles`.
        """
        self._published = published
        self._gathering = gathering
        self._host = host
        self._token = token
        self._backend: Backend = backend
        self._bucket_bytes = bucket_bytes
        self._deadline_seconds = deadline_seconds
        self._device = device
        self._given = given
        self._changed = asyncio.Event()
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights-broadcast")
        self._groups: dict[frozenset[str], Group] = {}
        """Groups by their members, the one used last at the end."""
        self.num_groups = 0
        """Groups made so far."""
        self.num_bytes_broadcast = 0
        """Bytes given to broadcasts: once for all members of a group."""

    async def run(self, listener: socket.socket) -> None:
        """Serves until it is cancelled; a broadcast under way then ends with its bucket."""
        try:
            async with asyncio.TaskGroup() as receivers:
                server = await asyncio.start_server(
                    lambda reader, writer: receivers.create_task(self._converse(reader, writer)),
                    sock=listener,
                    limit=rendezvous.MAX_LINE,
                )
                try:
                    await self._serve_rounds()
                finally:
                    server.close()
        finally:
            self._closing.set()
            self._thread.shutdown(wait=False)

    def drop_groups(self) -> None:
        """Drops all groups, after `run` has ended. Waits for the bucket under way."""
        self._thread.shutdown()
        self._groups.clear()

    # --- One receiver -----------------------------------------------------------------------------

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Waits until the receiver's round is over or it hangs up. A receiver that asks nothing is
        dropped at the deadline.
        """
        try:
            async with asyncio.timeout(self._deadline_seconds):
                ask = rendezvous.read_ask(await reader.readline())
            refusal = self._refusal(ask)
            if refusal is None:
                await self._wait_in_line(ask, reader, writer)
            else:
                writer.write(rendezvous.line(refusal))
        except (TimeoutError, OSError, ValueError, msgspec.MsgspecError) as error:
            _log.info(
                (
                    "direct transport: a connection ended without a question that could be "
                    "answered: %s"
                ),
                error,
            )
        finally:
            writer.close()

    async def _wait_in_line(
        self, ask: Ask, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        since = asyncio.get_running_loop().time()
        member = WaitingReceiver(
            ask,
            since,
            answer=lambda answer: writer.write(rendezvous.line(answer)),
            hang_up=writer.close,
        )
        try:
            if self._gathering.join(member):
                self._changed.set()
                # nothing more is said: this is the end of the connection, by either side
                await reader.read(1)
        finally:
            self._gathering.leave(member)
            self._changed.set()

    def _refusal(self, ask: Ask) -> Refused | None:
        if not same_token(ask.token, self._token):
            return Refused("the secret is wrong: the manifest is another publisher's")
        return self._unknown(ask) if self._version(ask) is None else None

    def _unknown(self, ask: Ask) -> Refused:
        known = ", ".join(map(str, tuple(self._published))) or "none"
        return Refused(
            f"the bytes {ask.fingerprint[:12]} are not published or were released; there are "
            f"versions: {known}"
        )

    def _version(self, ask: Ask) -> OutgoingVersion | None:
        """The published version that hashes to this. Copies the values first: the trainer may
        publish meanwhile.
        """
        return next(
            (p for p in tuple(self._published.values()) if p.fingerprint == ask.fingerprint),
            None,
        )

    # --- Rounds -----------------------------------------------------------------------------------

    async def _serve_rounds(self) -> None:
        """Waits for members; ended by cancellation."""
        while True:
            members = await self._gathered()
            try:
                await self._round(members)
            except (GroupBroken, RuntimeError, OSError) as error:
                _log.warning(
                    "broadcasting version %d to %d receivers: %s",
                    members[0].ask.version,
                    len(members),
                    error,
                )
            finally:
                for member in members:
                    member.hang_up()

    async def _gathered(self) -> list[WaitingReceiver]:
        """Waits for a first member, then for the others; woken by each that comes or goes, ended by
        the quiet time.
        """
        clock = asyncio.get_running_loop().time
        while (seconds := self._gathering.seconds_left(clock())) is None or seconds > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
        return self._gathering.take()

    async def _round(self, members: list[WaitingReceiver]) -> None:
        """Waits for the broadcast's thread, which has deadlines. Members want the same bytes."""
        version = self._version(members[0].ask)
        if version is None:  # released meanwhile
            _answer(members, self._unknown(members[0].ask))
            return
        hashed = any(m.ask.workers is not None for m in members)
        way = self._way(members[0].ask, version)
        group = self._standing(members, way)
        if group is None:
            group = await self._meet(members, way)
        else:
            _answer(members, KeepGroup())
        digests = await self._in_thread(self._broadcast, group, version, hashed)
        self._keep(members, group)
        if isinstance(version, VersionOfWeights):
            # others have the device before the trainer has it again
            await self._in_thread(give_back, self._device)
        # else it was released, and the bytes that were hashed may not be those that were sent
        if self._version(members[0].ask) is version:
            _answer([m for m in members if m.ask.workers is not None], LastBucketSent(digests))

    def _way(self, ask: Ask, version: OutgoingVersion) -> GroupWay:
        """The way of a round, whose members are alike."""
        if self._given is not None:
            if ask.handles:
                return GroupWay("handles", on_device=self._device != CPU)
            return GroupWay("gloo", on_device=False)
        # What has left the device goes back to it bucket by bucket, if only that is taken.
        has_left = version.device == CPU and ask.meets == "plugin"
        on_device = ask.workers is not None and self._device != CPU and not has_left
        backend = self._backend if on_device or self._device == CPU else "gloo"
        return GroupWay(backend, on_device=on_device)

    def _broadcast(self, group: Group, version: OutgoingVersion, hashed: bool) -> tuple[str, ...]:
        """Sends all buckets. Returns the digest of each if it is `hashed`."""
        on_device = group.terms.on_device
        digests: list[str] = []
        found: list[Tensor] = []
        lengths: list[int] = []
        use_device(self._device)
        by_handles = group.terms.backend == "handles"
        with (
            torch.no_grad(),
            own_stream(self._device if by_handles else CPU),
            contextlib.closing(group) if by_handles else contextlib.nullcontext(),
            contextlib.closing(version.parts(group.terms.meets, self._bucket_bytes)) as coming,
        ):
            for place in coming:
                if self._closing.is_set():
                    group.close()
                    raise GroupBroken("the publisher is closing")
                part = place.to(self._device if on_device else CPU)
                self.num_bytes_broadcast += len(part)
                group.broadcast(part)
                if hashed and on_device:
                    found.append(lanes(part))
                    lengths.append(len(part))
                elif hashed:
                    sent: memoryview = part.numpy().data
                    digests.append(hashlib.sha256(sent).hexdigest()[: rendezvous.DIGEST_DIGITS])
            return (*digests, *device_digests(found, lengths))

    async def _in_thread(self, deed: Callable[..., T], *args: object) -> T:
        """Runs a blocking call in the service's one thread. Each call has its deadlines."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, deed, *args)

    # --- Groups -----------------------------------------------------------------------------------

    def _standing(self, members: list[WaitingReceiver], way: GroupWay) -> Group | None:
        """The group of exactly these members, if all of them hold it too, and it has this way.
        Other groups with any of these members are dropped. This group is dropped too until its
        broadcast is over: a receiver has one group, and a round that fails leaves none.
        """
        names = _names(members)
        group = self._groups.get(names)
        self._groups = {n: g for n, g in self._groups.items() if not n & names}
        if group is None:
            return None
        if GroupWay(group.terms.backend, on_device=group.terms.on_device) != way:
            return None
        if any(member.ask.group != group.terms.group for member in members):
            return None
        return group

    def _keep(self, members: list[WaitingReceiver], group: Group) -> None:
        """Keeps the group for the next version. The bucket of a group by handles is closed."""
        if group.terms.backend == "handles":
            return
        self._groups[_names(members)] = group
        for oldest in list(self._groups)[:-MAX_GROUPS]:
            del self._groups[oldest]

    async def _meet(self, members: list[WaitingReceiver], way: GroupWay) -> Group:
        """Makes a group. Waits until all members have come."""
        self.num_groups += 1
        if self._given is not None and way.backend == "handles":
            return await self._meet_by_handles(members, way, self._given)
        store = serve_store(self._host)
        meets = members[0].ask.meets
        by_id = meets == "nccl_id" and way.backend == "nccl"
        terms = self._terms(members, way, port=store.port, meets=meets)
        if by_id:
            terms = msgspec.structs.replace(terms, nccl_id=new_nccl_id())
        self._invite(members, terms)

        def join() -> BroadcastGroup:
            use_device(self._device)
            return BroadcastGroup(terms, store, interface=self._host)

        return await self._in_thread(join)

    async def _meet_by_handles(
        self, members: list[WaitingReceiver], way: GroupWay, given: GivenBuckets
    ) -> HandleGroup:
        """Makes a group that reads a bucket. Members that cannot open it are told, and the others
        ask again.
        """
        bucket = await self._in_thread(given.take)
        listener = listen(self._host)
        terms = self._terms(
            members, way, port=listener.getsockname()[1], bucket=given.describe(bucket)
        )
        self._invite(members, terms)
        try:
            return await self._in_thread(HandleGroup, terms, listener, bucket, given.leave)
        except BucketsRefused as refused:
            first = 1
            for member in members:
                ranks = range(first, first + member.ask.ranks)
                why = [refused.why[rank] for rank in ranks if rank in refused.why]
                if why:
                    member.answer(HandlesRefused(why[0]))
                first = ranks.stop
            raise

    def _terms(
        self,
        members: list[WaitingReceiver],
        way: GroupWay,
        *,
        port: int,
        meets: Meeting = "plugin",
        bucket: BucketHandle | None = None,
    ) -> Join:
        """The terms of a new group, as its first member has them."""
        return Join(
            group=secrets.token_hex(8),
            rank=0,
            world=1 + sum(m.ask.ranks for m in members),
            port=port,
            backend=way.backend,
            bucket_bytes=self._bucket_bytes,
            deadline_seconds=self._deadline_seconds,
            on_device=way.on_device,
            meets=meets,
            bucket=bucket,
        )

    def _invite(self, members: list[WaitingReceiver], terms: Join) -> None:
        first = 1
        for member in members:
            member.answer(msgspec.structs.replace(terms, rank=first))
            first += member.ask.ranks


def _answer(members: list[WaitingReceiver], answer: Answer) -> None:
    for member in members:
        member.answer(answer)


def _names(members: list[WaitingReceiver]) -> frozenset[str]:
    return frozenset(m.ask.member for m in members)


CLOSE_SECONDS = 2.0
"""The time that `close` waits for its threads. A broadcast to a receiver that was stopped outlives
it, until its own deadline.
"""


class BroadcastPublisher(Publisher):
    """Keeps versions in buffers until receivers ask for them. `publish` never waits for a receiver.

    `BroadcastService` sends them in a thread of its own. A version can be fetched until its
    `release`, also by engines that rejoin. If bytes are released while they are read, the reader
    gets `WeightsCorrupt`, as with the other transports.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        backend: Backend | None = None,
        device: torch.device = CPU,
        num_slots: int = MAX_HELD,
        bucket_bytes: int = BUCKET_BYTES,
        quiet_seconds: float = 0.05,
        deadline_seconds: float = 10.0,
        threads: int = 1,
        out_of_weights: bool = False,
    ) -> None:
        """`host` is the address of this machine that engines reach it by; it listens there only.
        The bytes are not encrypted.

        Receivers begin at once when the expected number has come. Otherwise those that came begin
        after `quiet_seconds` without another. `deadline_seconds` bounds the making of a group and
        each bucket: 10 s for 64 MiB is a network of 50 Mbit/s.

        The newest version is kept on `device`, if that has room, and those before it in host
        memory. If it is not the CPU, the workers of servers must have a device too: the bytes go
        from one to the other, without host memory between. `backend` is by default NCCL for GPUs,
        which must be different ones, and gloo elsewhere. With `handles` workers on this machine read
        buckets on the device, which may be theirs too (CUDA IPC); if that gives none, versions go
        from host memory, and the log says why. NCCL is untested.

        With `out_of_weights` a version on a device is not copied: its tensors stay as they are until
        `withdraw`.
        """
        if backend is None:
            backend = "nccl" if device.type == "cuda" else "gloo"
        given: GivenBuckets | None = None
        if backend == "handles":
            try:
                given = GivenBuckets(device, bucket_bytes)
            except HandleRefused as refused:
                _log.warning(
                    "versions go over host memory and not from GPU to GPU: %s. Make room on the "
                    'GPU, or set weights.transport = "shared_memory".',
                    refused,
                )
                backend = "gloo"
                device = CPU
        self._given = given
        self._out_of_weights = out_of_weights
        self._threads = threads
        self._held: dict[Version, OutgoingVersion] = {}
        self._num_slots = num_slots
        self._buffers = StandingBuffers(num_slots)
        self._on_device = DeviceBuffer(device)
        self._newest: Version | None = None
        """The version that is on the device."""
        self._listener = _listener(host)
        self._address = Address(host, self._listener.getsockname()[1], secrets.token_hex(16))
        self.service = BroadcastService(
            self._held,
            Gathering(quiet_seconds=quiet_seconds, apart=device != CPU),
            host=host,
            device=device,
            token=self._address.token,
            backend=backend,
            bucket_bytes=bucket_bytes,
            deadline_seconds=deadline_seconds,
            given=given,
        )
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self.service.run(self._listener))
        self._thread = threading.Thread(target=self._serve, name="weights-broadcast", daemon=True)
        self._thread.start()

    def publish(
        self, version: Version, tensors: Mapping[str, Tensor], fill: Fill = copied
    ) -> WeightManifest:
        """One copy of each tensor into a free buffer, then its fingerprint."""
        if not self._thread.is_alive():
            raise RunFailed(
                f"publishing version {version}: the service that sends weights has ended; make a "
                "new publisher."
            )
        specs = layout(named_shapes(tensors))
        device = self._on_device.device
        if self._out_of_weights and device != CPU:
            check_slot(version, self._held, num_slots=self._num_slots)
            digest = fingerprint_of_each(specs, tensors, fill, device)
            give_back(device)
            return self.hold(version, VersionOfWeights(tensors, fill, digest, specs, device))
        if device != CPU and self._on_device.fits(extent(specs)):
            check_slot(version, self._held, num_slots=self._num_slots)
            self._make_room()
            data = self._on_device.filled(specs, tensors, fill)
            digest = device_fingerprint(specs, data)
            self._newest = version
            return self.hold(version, WholeVersion(data, digest, specs))
        buffer = self._buffers.take(version, extent(specs))
        copy_into(buffer, specs, tensors, fill)
        with memoryview(buffer) as view:
            digest = fingerprint(specs, view, threads=self._threads)
        self._buffers.hold(version, buffer)
        data = torch.frombuffer(buffer, dtype=torch.uint8)[: extent(specs)]
        return self.hold(version, WholeVersion(data, digest, specs))

    def hold(self, version: Version, outgoing: OutgoingVersion) -> WeightManifest:
        """Publishes a version that is elsewhere. It is sent from there until its release."""
        self._held[version] = outgoing
        place = str(self._address)
        return WeightManifest(version, outgoing.fingerprint, DIRECT, place, outgoing.tensors)

    def _make_room(self) -> None:
        """Moves the version that is on the device to host memory, if an engine may still fetch it.
        A broadcast of it that is under way breaks, and is made again from there.
        """
        held = None if self._newest is None else self._held.get(self._newest)
        if isinstance(held, WholeVersion) and self._newest is not None:
            self._held[self._newest] = replace(held, data=held.data.cpu())
        self._newest = None

    def release(self, version: Version) -> None:
        self._held.pop(version, None)
        self._buffers.release(version)

    def withdraw(self) -> None:
        """A round that is under way is not confirmed: its bytes may be of two versions."""
        for version, held in tuple(self._held.items()):
            if isinstance(held, VersionOfWeights):
                del self._held[version]

    def close(self) -> None:
        """Receivers that wait or receive get an error at the end of the bucket under way. See
        `CLOSE_SECONDS`.
        """
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ended by itself meanwhile
                self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join(CLOSE_SECONDS)
        self._held.clear()
        self._buffers.clear()
        if self._given is not None and not self._thread.is_alive():
            self._given.free()

    def _serve(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._serving)
        finally:
            self._listener.close()
            self.service.drop_groups()
            self._loop.close()


def _listener(host: str) -> socket.socket:
    try:
        return listen(host)
    except OSError as error:
        raise ConfigError(
            f"publishing weights: cannot listen on {host!r} ({error}); name an address of this "
            "machine."
        ) from error
