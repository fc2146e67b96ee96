"""The companion's end of the direct transport. It asks the publisher on behalf of its server's
workers. The publisher and the workers both tell it whether all bytes have come.

`DirectRound` is the state: asked, ordered, sent and held. It never waits. `DirectFeed` waits, and
decides nothing. The bytes pass through neither: they go from the trainer's memory into the workers.
"""

import asyncio
import logging
import secrets
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import msgspec

from midflight.errors import EngineError, EngineUnavailable, WeightsCorrupt
from midflight.ports import ServerWorkers
from midflight.types import Meeting, TensorSpec, TransferOrder, WeightManifest, WorkerState
from midflight.weights.manifest import extent, repacked
from midflight.weights.transports.rendezvous import (
    MAX_LINE,
    Address,
    Answer,
    Ask,
    HandlesRefused,
    Join,
    KeepGroup,
    LastBucketSent,
    Refused,
    line,
    packs,
    read_answer,
)

_log = logging.getLogger(__name__)

ATTEMPTS = 2
"""A server that dies breaks its group for the others too, which meet again without it. A second
failure goes to the handover.
"""
LOOK_SECONDS = 0.01
"""The time between two questions whether the last bucket is laid out. The workers can only answer,
so they cannot say so by themselves.
"""


class RoundBroken(Exception):
    """A round failed. Nothing that is served has changed, and the group is useless. The next round
    makes another.
    """


class CannotOpen(RoundBroken):
    """The workers cannot open the publisher's bucket. The text says why."""


@dataclass(frozen=True, slots=True)
class Leg:
    """The bytes of one broadcast: a version, or a difference that makes one."""

    sent: WeightManifest
    """The manifest of the bytes that go over the wire."""
    tensors: tuple[TensorSpec, ...]
    """The tensors of the version that they make, packed."""
    fingerprint: str
    """The fingerprint of that version."""
    base: str = ""
    """The fingerprint of the version that they change, if they are a difference."""
    serves: bool = True
    """True for the last leg of a way, whose version will be served."""


def legs(manifest: WeightManifest, held: Set[str | None]) -> Sequence[Leg]:
    """The way to a version for workers that hold the bytes of these fingerprints. It consists of
    the differences that they lack, if all hold the same version and it is on the way. Otherwise the
    whole version at its beginning comes first.
    """
    specs = repacked(manifest.tensors)
    deltas = manifest.deltas
    if not deltas:
        return [Leg(manifest, specs, manifest.fingerprint)]
    made = [(delta.base, delta.base_fingerprint) for delta in deltas[1:]]
    made.append((manifest.version, manifest.fingerprint))
    way = list[Leg]()
    for (version, fingerprint), delta in zip(made, deltas, strict=True):
        sent = replace(
            manifest,
            version=version,
            fingerprint=delta.payload_fingerprint,
            location=delta.location,
            tensors=(delta.payload,),
            deltas=(),
        )
        serves = fingerprint == manifest.fingerprint
        way.append(Leg(sent, specs, fingerprint, base=delta.base_fingerprint, serves=serves))
    for number, delta in enumerate(deltas):
        if held == {delta.base_fingerprint}:
            return way[number:]
    first = deltas[0]
    whole = replace(manifest, version=first.base, fingerprint=first.base_fingerprint, deltas=())
    return [Leg(whole, specs, first.base_fingerprint, serves=False), *way]


class DirectRound:
    """One version on its way into one server's workers: asked, ordered, sent, held.

    | state | entered by | what may come |
    |---|---|---|
    | asked | `ask` | the publisher's answer: `order` |
    | ordered | `order` | the publisher's word that all is sent: `sent` |
    | sent | `sent` | what the workers hold: `landed` |

    A failure raises `RoundBroken`, or `WeightsCorrupt` if another round would end in the same way.
    """

    def __init__(
        self,
        leg: Leg,
        *,
        member: str,
        group: str | None,
        workers: int,
        keeps: bool = False,
        meets: Meeting = "plugin",
        handles: bool = False,
    ) -> None:
        """`group` is the group that these workers were in last, if it did not break. `member` names
        the server to the publisher. With `keeps` differences from this version are expected. With
        `handles` the workers try to open the publisher's bucket.
        """
        self._leg = leg
        self._manifest = leg.sent
        self._keeps = keeps
        self._meets: Meeting = meets
        self._handles = handles
        self._member = member
        self._group = group
        self._workers = workers
        self._terms: Join | None = None
        self._digests: tuple[str, ...] = ()

    def ask(self, token: str) -> Ask:
        """The question to the publisher."""
        return Ask(
            token=token,
            version=self._manifest.version,
            fingerprint=self._manifest.fingerprint,
            member=self._member,
            group=self._group,
            expected=self._manifest.receivers,
            workers=self._workers,
            meets=self._meets,
            handles=self._handles,
        )

    def order(self, answer: Answer, known: Join | None, *, host: str) -> TransferOrder:
        """The order for the workers. `known` is the terms of the group that they were in last."""
        match answer:
            case Join():
                self._terms = answer
            case KeepGroup() if known is not None and known.group == self._group:
                self._terms = known
            case Refused(reason):
                raise WeightsCorrupt(
                    f"fetching version {self._manifest.version}: {reason}; publish a version again."
                )
            case _:
                raise RoundBroken("the publisher names a group that was never made")
        leg = self._leg
        terms = self._terms
        return TransferOrder(
            version=self._manifest.version,
            group=terms.group,
            again=isinstance(answer, KeepGroup),
            host=host,
            port=terms.port,
            rank=terms.rank,
            workers=self._workers,
            world=terms.world,
            backend=terms.backend,
            bucket_bytes=terms.bucket_bytes,
            deadline_seconds=terms.deadline_seconds,
            num_bytes=extent(repacked(leg.sent.tensors)),
            tensors=tuple((s.name, s.dtype, s.shape, s.offset, s.num_bytes) for s in leg.tensors),
            fingerprint=leg.fingerprint,
            base=leg.base,
            keeps=self._keeps,
            serves=leg.serves,
            on_device=terms.on_device,
            nccl_id=terms.nccl_id,
            bucket=terms.bucket,
            buckets=self._buckets(terms.bucket_bytes),
        )

    def _buckets(self, bucket_bytes: int) -> tuple[tuple[str, ...], ...]:
        if self._meets == "plugin":
            return ()
        buckets: list[tuple[str, ...]] = []
        for pack in packs(self._leg.tensors, bucket_bytes):
            buckets.append(tuple(spec.name for spec in pack))
        return tuple(buckets)

    def sent(self, answer: Answer | None) -> None:
        """Takes the publisher's word that all is sent. `None` means that the publisher
        has hung up.
        """
        if isinstance(answer, HandlesRefused):
            raise CannotOpen(answer.reason)
        if not isinstance(answer, LastBucketSent):
            raise RoundBroken("the broadcast did not come to its end")
        self._digests = answer.digests

    def landed(self, states: Sequence[WorkerState]) -> Join | None:
        """The terms of the group, which remains, once each worker holds exactly the bytes that were
        sent. `None` while a worker still lays them out.
        """
        if len(states) != self._workers:
            raise RoundBroken(f"the server has {len(states)} workers and had {self._workers}")
        for index, state in enumerate(states):
            if state.error or state.version != self._manifest.version:
                raise RoundBroken(
                    f"worker {index} has none of it: {state.error or 'it was started again'}"
                )
            if state.done and state.digests != self._digests:
                wrong = _first_difference(state.digests, self._digests)
                raise RoundBroken(f"bucket {wrong} of worker {index} is not what was sent")
        if not all(state.done for state in states):
            return None
        return self._terms


def _first_difference(found: Sequence[str], sent: Sequence[str]) -> int:
    """The number of the first bucket whose digest differs. If none differs, it is the number of
    buckets found.
    """
    for number, (theirs, ours) in enumerate(zip(found, sent, strict=False)):
        if theirs != ours:
            return number
    return len(found)


class DirectFeed:
    """Implements `ports.WorkerFeed` for one server. It keeps the group for the next version,
    because making one takes time.
    """

    def __init__(self, *, answer_seconds: float = 60.0) -> None:
        """`answer_seconds` is the time that the publisher may be busy with the rounds before ours.
        A group's own deadlines come from it.
        """
        self._answer_seconds = answer_seconds
        self._member = secrets.token_hex(8)
        self._group: Join | None = None
        """The terms of the group that the workers are in, which no round has broken."""
        self._keeps = False
        """True from the first difference on: then more are expected."""
        self.refusal = ""
        """Why the workers cannot open the publisher's bucket, as the first version showed. It is empty
        if they can, or have not tried.
        """
        self._has_opened = False
        """True if they have opened it."""

    async def bring(self, manifest: WeightManifest, workers: ServerWorkers) -> None:
        """Waits for the publisher and the workers. Their deadlines, or the caller's, end the wait."""
        broken: Exception | None = None
        if manifest.deltas:
            self._keeps = True
        for _ in range(ATTEMPTS):
            # A round that fails, or is cancelled, leaves no group.
            known = self._group
            self._group = None
            try:
                # This also shows that the workers answer. No group may be met for a server that was
                # stopped, because the group would wait for it.
                states = await workers.states()
                for leg in legs(manifest, {state.held for state in states}):
                    at = DirectRound(
                        leg,
                        member=self._member,
                        group=None if known is None else known.group,
                        workers=len(states),
                        keeps=self._keeps,
                        meets=workers.meets,
                        handles=self._tries_handles(workers),
                    )
                    known = await self._round(at, leg.sent, workers, known)
                self._group = known
                return
            except (EngineUnavailable, WeightsCorrupt):
                raise
            except CannotOpen as error:
                broken = error
                self._cannot_open(error)
            except (RoundBroken, EngineError) as error:
                broken = error
        raise EngineUnavailable(
            f"bringing version {manifest.version} to the server's workers: it broke {ATTEMPTS} "
            f"times ({broken}); stage it again."
        ) from broken

    def _tries_handles(self, workers: ServerWorkers) -> bool:
        """True if the workers are to open the publisher's bucket, should it have one for them. Bytes
        that a difference changes they keep in host memory.
        """
        return not self.refusal and workers.meets == "plugin" and not self._keeps

    def _cannot_open(self, why: CannotOpen) -> None:
        """The way is chosen at the first version. Later ones do not silently take a slower one."""
        if self._has_opened:
            return
        self.refusal = str(why)
        _log.warning(
            "versions come over host memory and not from GPU to GPU: %s. Run trainer and server as "
            "one user in one container (docker: --ipc=host), on GPUs that read each other's memory, "
            'or set weights.transport = "shared_memory".',
            why,
        )

    async def _round(
        self, at: DirectRound, manifest: WeightManifest, workers: ServerWorkers, known: Join | None
    ) -> Join:
        try:
            address = Address.parse(manifest.location)
            async with asyncio.timeout(self._answer_seconds):
                reader, writer = await asyncio.open_connection(
                    address.host, address.port, limit=MAX_LINE
                )
            try:
                writer.write(line(at.ask(address.token)))
                async with asyncio.timeout(self._answer_seconds):
                    answer = read_answer(await reader.readline())
                host: str = writer.get_extra_info("peername")[0]
                await workers.receive(at.order(answer, known, host=host))
                ended = await reader.readline()  # the publisher hangs up if the round failed
                at.sent(read_answer(ended) if ended else None)
            finally:
                writer.close()
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise EngineUnavailable(
                f"fetching version {manifest.version}: the publisher does not answer ({error}); "
                "publish the version again."
            ) from error
        terms = at.landed(await workers.states())
        while terms is None:
            await asyncio.sleep(LOOK_SECONDS)
            terms = at.landed(await workers.states())
        self._has_opened = self._has_opened or terms.bucket is not None
        return terms
