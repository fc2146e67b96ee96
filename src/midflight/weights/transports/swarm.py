"""A version cut into buckets, each with its hashes, and a receiver's knowledge of the sources that
hold them. Nothing here waits or reads: `pull` does.

    fingerprint of the version      SHA-256 over all digests, names, dtypes and shapes
                                    (`models.sizes`)
      bucket 0     bucket 1  ...    what is asked for at once: leaves of one owner,
                                    `PIECE` bytes at most
        leaf leaf    leaf           a stretch of one tensor's bytes, and its XXH3-128

The tree is not in the manifest, which every engine gets over the control plane. Any source gives
it, and the fingerprint proves it.
"""

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

from midflight.models.sizes import PIECE, fingerprint_digests, piece_digest
from midflight.types import TensorSpec

AT_ONCE = 2
"""The number of buckets that a receiver has under way from one source. While one is checked, the
next is on its way.
"""
MAX_KNOWN = 16
"""The number of sources that one receiver has at a time, so that a thousand do not ask
a thousand.
"""
STRIKES = 3
"""After so many failures without a bucket in between a source is not asked again."""


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    tensor: int
    """The tensor's number in the manifest."""
    start: int
    stop: int
    """Both in bytes of the tensor."""
    digest: bytes


Bucket = tuple[Leaf, ...]
Tree = tuple[Bucket, ...]


def cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The parts of a stretch of a tensor's bytes that its owner hashes at once. They are cut at the
    same places as whole tensors for their fingerprint.
    """
    while start < stop:
        end = min(stop, start - start % PIECE + PIECE)
        yield start, end
        start = end


def bucketed(leaves: Iterable[Leaf]) -> Iterator[Bucket]:
    """Puts neighbours together, so that a small tensor costs no question of its own."""
    bucket = list[Leaf]()
    size = 0
    for leaf in leaves:
        num_bytes = leaf.stop - leaf.start
        if bucket and size + num_bytes > PIECE:
            yield tuple(bucket)
            bucket = []
            size = 0
        bucket.append(leaf)
        size += num_bytes
    if bucket:
        yield tuple(bucket)


def root(tree: Tree, specs: Sequence[TensorSpec]) -> str:
    """The fingerprint of a version with such leaves. Raises `ValueError` unless they cover each
    byte of each tensor once.
    """
    leaves: list[tuple[int, int, int, bytes]] = []
    for bucket in tree:
        for leaf in bucket:
            leaves.append((leaf.tensor, leaf.start, leaf.stop, leaf.digest))
    leaves.sort()
    digests: list[list[bytes]] = [[] for _ in specs]
    ends = [0] * len(specs)
    for tensor, start, stop, digest in leaves:
        is_known = 0 <= tensor < len(specs)
        if not is_known or start != ends[tensor] or not start < stop <= start + PIECE:
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
    names = [spec.name for spec in specs]
    return fingerprint_digests(specs, dict(zip(names, digests, strict=True)))


Views = tuple[memoryview, ...]
"""The leaves of a bucket, in order."""


def leaf_views(
    tree: Tree, specs: Sequence[TensorSpec], tensors: Mapping[str, memoryview]
) -> list[Views]:
    """The views of each bucket, over a memory that holds the whole version."""
    found: list[Views] = []
    for bucket in tree:
        views: list[memoryview] = []
        for leaf in bucket:
            whole = tensors[specs[leaf.tensor].name]
            views.append(whole[leaf.start : leaf.stop])
        found.append(tuple(views))
    return found


def is_right(bucket: Bucket, found: Views) -> bool:
    """True if these are the bytes that were published (I7)."""
    pairs = zip(bucket, found, strict=True)
    return all(piece_digest(view) == leaf.digest for leaf, view in pairs)


# --- Sources --------------------------------------------------------------------------------------


def sources_in(location: str) -> tuple[str, ...]:
    """The addresses in a manifest's location, `http://HOST:PORT/SECRET` with blanks between. Raises
    `ValueError` if a part is missing. It names the part, without the secret.
    """
    found = tuple(location.split())
    for source in found:
        url = urlsplit(source)
        secret = url.path.removeprefix("/")
        if url.scheme != "http" or not url.hostname or not url.port or not secret:
            raise ValueError("its location is not http://HOST:PORT/SECRET")
    if not found:
        raise ValueError("its location names no source")
    return found


def place(source: str) -> str:
    """The host and port of a source, which may be shown: the secret is not in it."""
    return urlsplit(source).netloc


@dataclass(slots=True)
class _KnownSource:
    holds: frozenset[int] = frozenset()
    under_way: int = 0
    strikes: int = 0
    gives_last: bool = False
    """True if the source is asked last among the sources that hold a bucket."""


@dataclass(slots=True)
class Transfer:
    """Decides which bucket is fetched from which source, until all are here or no source has the
    rest.

    A source whose bytes are wrong is asked for nothing more, and named in `blamed`. A source that
    fails `STRIKES` times is in `lost`. Any other source that has a bucket gives it. The trainer's
    own addresses are asked last, so that engines give their buckets to each other.
    """

    num_buckets: int
    chance: random.Random = field(default_factory=random.Random)
    blamed: dict[str, str] = field(default_factory=dict[str, str])
    """The reason, by source."""
    lost: dict[str, str] = field(default_factory=dict[str, str])
    """The reason, by source."""
    _order: list[int] = field(default_factory=list[int], init=False)
    """The buckets that no source was asked for yet. Their order differs between receivers, so that
    these soon have different ones to give.
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
        """The sources that may be asked."""
        return tuple(self._known)

    @property
    def is_lost(self) -> bool:
        """True if buckets are missing and no source is left to ask."""
        return bool(self._order) and not self._known

    def hear_of(self, source: str, *, gives_last: bool = False) -> bool:
        """Takes note of a source. Returns whether it is new and may be asked."""
        if source in self._known or source in self.blamed or source in self.lost:
            return False
        if len(self._known) >= MAX_KNOWN:
            return False
        self._known[source] = _KnownSource(gives_last=gives_last)
        return True

    def here(self, buckets: Collection[int]) -> None:
        """Takes note that these buckets were here already."""
        self._order = [bucket for bucket in self._order if bucket not in buckets]

    def offers(self, source: str, buckets: Iterable[int]) -> bool:
        """Takes note that the source has these buckets now. Returns whether these are all."""
        holds = frozenset(buckets)
        known = self._known.get(source)
        if known is not None:
            known.holds = holds
        return len(holds) == self.num_buckets

    def take(self) -> tuple[str, int] | None:
        """The source to ask now, and the bucket to ask for. `None` if at the moment no source can
        give a missing bucket.
        """
        asked: list[tuple[bool, int, float, str]] = []
        for source, known in self._known.items():
            if known.under_way < AT_ONCE:
                asked.append((known.gives_last, known.under_way, self.chance.random(), source))
        for _, _, _, source in sorted(asked):
            known = self._known[source]
            for at, bucket in enumerate(self._order):
                if bucket in known.holds:
                    del self._order[at]
                    known.under_way += 1
                    self._under_way[bucket] = source
                    return source, bucket
        return None

    def arrived(self, bucket: int) -> None:
        """The bucket is here, and right."""
        known = self._ended(bucket)
        if known is not None:
            known.strikes = 0

    def wrong(self, bucket: int) -> None:
        """The bucket's bytes are not those that were published. Another source has to give it."""
        source = self._under_way[bucket]
        self._again(bucket)
        self._known.pop(source, None)
        self.blamed[source] = f"wrong bytes in bucket {bucket}"

    def failed(self, bucket: int, why: str) -> None:
        """The bucket did not come. It is to come from any source that has it, which after the next
        question may be the same one.
        """
        source = self._under_way[bucket]
        self._again(bucket)
        self.silent(source, why)

    def silent(self, source: str, why: str) -> None:
        """The source did not answer."""
        known = self._known.get(source)
        if known is None:
            return
        known.strikes += 1
        known.holds = frozenset()
        if known.strikes >= STRIKES:
            del self._known[source]
            self.lost[source] = why

    def busy(self, bucket: int) -> None:
        """The bucket's source has too many to serve. It may be asked again after it has made its
        next offer.
        """
        source = self._under_way[bucket]
        self._again(bucket)
        self.offers(source, ())

    def complaint(self) -> str:
        """A complaint for people: the missing buckets and the reason."""
        waiting = "no source is left"
        if self._known:
            places = ", ".join(map(place, self._known))
            waiting = f"{places} lack them"
        missing = len(self._order) + len(self._under_way)
        said = f"{missing} of {self.num_buckets} buckets are missing, and {waiting}"
        reasons = self.blamed | self.lost
        if not reasons:
            return said
        told = "; ".join(f"{place(source)}: {why}" for source, why in reasons.items())
        return f"{said} ({told})"

    def _again(self, bucket: int) -> None:
        self._ended(bucket)
        self._order.insert(self.chance.randrange(len(self._order) + 1), bucket)

    def _ended(self, bucket: int) -> _KnownSource | None:
        known = self._known.get(self._under_way.pop(bucket))
        if known is not None:
            known.under_way -= 1
        return known
