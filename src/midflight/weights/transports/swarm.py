"""A version cut into buckets, each with its hashes, and what a receiver knows of who holds them.
Never waits and reads nothing: `pull` does.

    fingerprint of the version            SHA-256 over all digests, names, dtypes and shapes:
    `models.sizes`
      bucket 0     bucket 1     ...       what is asked for at once: leaves of one owner, `PIECE`
      bytes at most
        leaf leaf    leaf                 a stretch of one tensor's bytes, and its XXH3-128

The tree is not in the manifest, which every engine gets over the control plane: any source gives
it, and the fingerprint proves it.
"""

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

from midflight.models.sizes import PIECE, fingerprint_digests, piece_digest
from midflight.types import TensorSpec

TRANSPORT = "pull"
AT_ONCE = 2
"""Buckets that a receiver has under way from one source: while one is checked, the next is on its
way.
"""
MAX_KNOWN = 16
"""Sources of one receiver at a time, so that a thousand do not ask a thousand."""
STRIKES = 3
"""Failures without a bucket in between after which a source is not asked again."""


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    tensor: int
    """Its number in the manifest."""
    start: int
    stop: int
    """In bytes, of the tensor."""
    digest: bytes


Bucket = tuple[Leaf, ...]
Tree = tuple[Bucket, ...]


def cut(tensor: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """What the owner of this stretch hashes at once: cut where whole tensors are cut for their
    fingerprint too.
    """
    while start < stop:
        end = min(stop, start - start % PIECE + PIECE)
        yield tensor, start, end
        start = end


def bucketed(leaves: Iterable[Leaf]) -> Iterator[Bucket]:
    """Neighbours together, so that a small tensor costs no question of its own."""
    bucket = list[Leaf]()
    size = 0
    for leaf in leaves:
        if bucket and size + leaf.stop - leaf.start > PIECE:
            yield tuple(bucket)
            bucket = []
            size = 0
        bucket.append(leaf)
        size += leaf.stop - leaf.start
    if bucket:
        yield tuple(bucket)


def root(tree: Tree, specs: Sequence[TensorSpec]) -> str:
    """The fingerprint of a version with such leaves. `ValueError` unless they are each tensor's
    bytes, every one once.
    """
    leaves = sorted(
        (leaf.tensor, leaf.start, leaf.stop, leaf.digest) for bucket in tree for leaf in bucket
    )
    digests: list[list[bytes]] = [[] for _ in specs]
    ends = [0] * len(specs)
    for tensor, start, stop, digest in leaves:
        if (
            not 0 <= tensor < len(specs)
            or start != ends[tensor]
            or not start < stop <= start + PIECE
        ):
            raise ValueError(
                f"a leaf has bytes {start} to {stop} of tensor {tensor}, where {len(specs)} "
                "tensors are cut in order"
            )
        digests[tensor].append(digest)
        ends[tensor] = stop
    for spec, end in zip(specs, ends, strict=True):
        if end != spec.num_bytes:
            raise ValueError(
                f"the leaves of tensor {spec.name!r} have {end} bytes of {spec.num_bytes}"
            )
    return fingerprint_digests(
        specs, {spec.name: found for spec, found in zip(specs, digests, strict=True)}
    )


Views = tuple[memoryview, ...]
"""The leaves of a bucket, in order."""


def leaf_views(
    tree: Tree, specs: Sequence[TensorSpec], tensors: Mapping[str, memoryview]
) -> list[Views]:
    """Of each bucket, over a memory that holds the whole version."""
    return [
        tuple(tensors[specs[leaf.tensor].name][leaf.start : leaf.stop] for leaf in bucket)
        for bucket in tree
    ]


def is_right(bucket: Bucket, found: Views) -> bool:
    """Whether these are the bytes that were published (I7)."""
    return all(piece_digest(view) == leaf.digest for leaf, view in zip(bucket, found, strict=True))


# --- Sources --------------------------------------------------------------------------------------


def sources_in(location: str) -> tuple[str, ...]:
    """The addresses in a manifest's location, `http://HOST:PORT/SECRET` with blanks between.
    `ValueError` names what is missing, without the secret."""
    found = tuple(location.split())
    for source in found:
        url = urlsplit(source)
        if (
            url.scheme != "http"
            or not url.hostname
            or not url.port
            or not url.path.removeprefix("/")
        ):
            raise ValueError("its location is not http://HOST:PORT/SECRET")
    if not found:
        raise ValueError("its location names no source")
    return found


def place(source: str) -> str:
    """Of a source, as it may be shown: without the secret."""
    return urlsplit(source).netloc


@dataclass(slots=True)
class _KnownSource:
    holds: frozenset[int] = frozenset()
    under_way: int = 0
    strikes: int = 0
    gives_last: bool = False
    """Of those who hold a bucket, it is asked last."""


@dataclass(slots=True)
class Transfer:
    """Which bucket is to come from which source, until all are here or nobody has the rest.

    A source whose bytes are wrong is asked for nothing more, and named in `blamed`; one that fails
    `STRIKES` times is in `lost`. Who else has a bucket gives it. The trainer's own addresses are
    asked last, so that engines give each other what they have.
    """

    num_buckets: int
    chance: random.Random = field(default_factory=random.Random)
    blamed: dict[str, str] = field(default_factory=dict[str, str])
    """Why, by source."""
    lost: dict[str, str] = field(default_factory=dict[str, str])
    _order: list[int] = field(default_factory=list[int], init=False)
    """Of the buckets that nobody was asked for yet: another in every receiver, so that they soon
    have different ones to give.
    """
    _under_way: dict[int, str] = field(default_factory=dict[int, str], init=False)
    _known: dict[str, _KnownSource] = field(default_factory=dict[str, _KnownSource], init=False)

    def __post_init__(self) -> None:
        self._order = self.chance.sample(range(self.num_buckets), self.num_buckets)

    @property
    def is_done(self) -> bool:
        return not self._order and not self._under_way

    @property
    def sources(self) -> tuple[str, ...]:
        """That may be asked."""
        return tuple(self._known)

    @property
    def is_lost(self) -> bool:
        """Buckets are missing, and there is nobody left to ask."""
        return bool(self._order) and not self._known

    def hear_of(self, source: str, *, gives_last: bool = False) -> bool:
        """Whether it is new, and may be asked."""
        if (
            source in self._known
            or source in self.blamed
            or source in self.lost
            or len(self._known) >= MAX_KNOWN
        ):
            return False
        self._known[source] = _KnownSource(gives_last=gives_last)
        return True

    def here(self, buckets: Collection[int]) -> None:
        """These were here already."""
        self._order = [bucket for bucket in self._order if bucket not in buckets]

    def offers(self, source: str, buckets: Iterable[int]) -> bool:
        """It has these now. Whether that is all."""
        holds = frozenset(buckets)
        if (known := self._known.get(source)) is not None:
            known.holds = holds
        return len(holds) == self.num_buckets

    def take(self) -> tuple[str, int] | None:
        """Who is to be asked for what now; `None` where nobody can give what is missing, at the
        moment.
        """
        asked = [
            (k.gives_last, k.under_way, self.chance.random(), source)
            for source, k in self._known.items()
            if k.under_way < AT_ONCE
        ]
        for *_, source in sorted(asked):
            known = self._known[source]
            for at, bucket in enumerate(self._order):
                if bucket in known.holds:
                    del self._order[at]
                    known.under_way += 1
                    self._under_way[bucket] = source
                    return source, bucket
        return None

    def arrived(self, bucket: int) -> None:
        """It is here, and right."""
        if (known := self._ended(bucket)) is not None:
            known.strikes = 0

    def wrong(self, bucket: int) -> None:
        """Its bytes are not those that were published: it is to come from another."""
        source = self._under_way[bucket]
        self._again(bucket)
        self._known.pop(source, None)
        self.blamed[source] = f"wrong bytes in bucket {bucket}"

    def failed(self, bucket: int, why: str) -> None:
        """It did not come: it is to come from whoever has it, at the next look the same source
        too.
        """
        source = self._under_way[bucket]
        self._again(bucket)
        self.silent(source, why)

    def silent(self, source: str, why: str) -> None:
        """It did not answer."""
        if (known := self._known.get(source)) is not None:
            known.strikes = known.strikes + 1
            known.holds = frozenset()
            if known.strikes >= STRIKES:
                del self._known[source]
                self.lost[source] = why

    def busy(self, bucket: int) -> None:
        """The source has too many to serve: it may be asked again after it has made its next
        offer.
        """
        source = self._under_way[bucket]
        self._again(bucket)
        self.offers(source, ())

    def complaint(self) -> str:
        """What is missing and why, for people."""
        told = [f"{place(source)}: {why}" for source, why in {**self.blamed, **self.lost}.items()]
        waiting = (
            f"{', '.join(map(place, self._known))} lack them"
            if self._known
            else "no source is left"
        )
        missing = len(self._order) + len(self._under_way)
        return f"{missing} of {self.num_buckets} buckets are missing, and {waiting}" + (
            f" ({'; '.join(told)})" if told else ""
        )

    def _again(self, bucket: int) -> None:
        self._ended(bucket)
        self._order.insert(self.chance.randrange(len(self._order) + 1), bucket)

    def _ended(self, bucket: int) -> _KnownSource | None:
        known = self._known.get(self._under_way.pop(bucket))
        if known is not None:
            known.under_way -= 1
        return known
