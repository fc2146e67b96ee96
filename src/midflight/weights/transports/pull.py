"""The engine's end of the pull transport. Buckets come from any source that has them, several at
once, and each is checked before it counts.

    manifest -> the machine's copy -> tree -> the buckets that are here already
             -> buckets from sources, given away meanwhile -> the copy, for engines to map

No group is made, so no engine waits for another: an engine that dies, or comes later, concerns its
own transfer only. This file needs no torch.

| wait | waits for | ended by |
|---|---|---|
| `MachineCopy.of` | another engine of this machine that fetches the same | its end, or `patience` |
| an answer | a source | it, or `answer_seconds` without a byte |
| `_PullJob.run` | its threads, which fetch; sources that may get more buckets | all buckets; no source left to ask; `patience` seconds without a megabyte |
"""

import http.client
import logging
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from midflight.errors import EngineUnavailable, WeightsCorrupt
from midflight.types import WeightManifest
from midflight.weights.manifest import extent, repacked, views
from midflight.weights.transports.bucket_server import (
    FROM,
    BucketInventory,
    BucketServer,
    SharedVersion,
)
from midflight.weights.transports.machine_copy import PREFIX, MachineCopy
from midflight.weights.transports.memory_files import remove_stale, shared_places
from midflight.weights.transports.swarm import (
    Transfer,
    Tree,
    Views,
    is_right,
    leaf_views,
    place,
    root,
    sources_in,
)

THREADS = 4
"""The number of threads that fetch. It is twice the number of buckets that one source is asked for
at once.
"""
LOOK_SECONDS = 0.1
"""The time between two questions to a source about its buckets, while it gets more or
was too busy.
"""
CALM_SECONDS = 1.0
"""The time between two such questions to a source that has all."""
END_SECONDS = 1.0
"""The time to wait for a thread that is still in a failed transfer's last question."""
READ_BYTES = 2**20
"""After so many bytes a transfer counts as alive: a slow network has a bucket under way for
minutes.
"""
KEPT = 1
"""The number of versions that are given away beside the one that is being fetched. It is the one
that is served.
"""
FAILURES = (OSError, http.client.HTTPException, msgspec.MsgspecError, ValueError)

_log = logging.getLogger(__name__)
_held = msgspec.json.Decoder(BucketInventory)
_tree = msgspec.json.Decoder(Tree)


class BucketMissing(Exception):
    """The source does not have the bucket that was asked for."""


class SourceBusy(Exception):
    """The source has too many to serve."""


class PullReceiver:
    """Implements `ports.WeightReceiver`. It gives a version away until it has fetched the second
    one after it.

    The caller gets the machine's copy mapped as its own memory, so that engines of one machine have
    one copy of a version between them.
    """

    def __init__(
        self,
        *,
        answer_seconds: float = 10.0,
        patience: float = 20.0,
        places: Sequence[Path] | None = None,
    ) -> None:
        """A source has failed after `answer_seconds` without a byte from it, and the transfer after
        `patience` seconds without a megabyte. `places` are the folders for the machine's copy, the
        best first. The default is /dev/shm, then the temporary folder.
        """
        self._answer_seconds = answer_seconds
        self._patience = patience
        self._places = shared_places() if places is None else list(places)
        self._server: BucketServer | None = None
        self._kept: dict[str, MachineCopy] = {}
        self.blamed = Counter[str]()
        """The number of times that a source, named as host:port, sent wrong bytes."""
        self.num_bytes = 0
        """The number of bytes that came over the network."""
        remove_stale(PREFIX, self._places)

    def fetch(self, manifest: WeightManifest) -> Mapping[str, memoryview]:
        """Bytes of each tensor by name. Raises `WeightsCorrupt` or `EngineUnavailable` if no source
        has the missing buckets. The weights that an engine serves stay as they are. One `fetch`
        runs at a time.
        """
        try:
            sources = sources_in(manifest.location)
        except ValueError as error:
            raise WeightsCorrupt(
                f"fetching version {manifest.version}: {error}; publish the version again."
            ) from error
        specs = repacked(manifest.tensors)
        self._forget(manifest.fingerprint)
        while True:
            copy = self._kept.get(manifest.fingerprint) or self._copy(manifest)
            if self._filled(copy, manifest, sources):
                self._kept[manifest.fingerprint] = copy
                return views(specs, copy.own())
            # Another engine found the copy whole, and it is not. From here on this one may write.
            copy.close()

    def close(self) -> None:
        """Stops giving buckets away. Callers keep the bytes that they have."""
        if self._server is not None:
            self._server.close()
        self._forget(None)

    def _copy(self, manifest: WeightManifest) -> MachineCopy:
        size = extent(repacked(manifest.tensors))
        return MachineCopy.of(
            manifest.location,
            manifest.fingerprint,
            size,
            places=self._places,
            patience=self._patience,
        )

    def _filled(self, copy: MachineCopy, manifest: WeightManifest, sources: Sequence[str]) -> bool:
        """Fetches the buckets that the copy lacks. Returns `False` only if another engine said that
        the copy is whole, and was wrong.
        """
        fetch = _PullJob(
            manifest, copy, sources, answer_seconds=self._answer_seconds, patience=self._patience
        )
        try:
            if not fetch.is_done:
                if not copy.is_alone:
                    return False
                self._give(manifest.fingerprint, fetch, sources)
                fetch.run()
            copy.whole()
        except BaseException:
            if self._server is not None:
                self._server.shares.pop(manifest.fingerprint, None)
            copy.close()
            raise
        finally:
            self.num_bytes += fetch.num_bytes
            self.blamed.update(map(place, fetch.transfer.blamed))
        return True

    def _give(self, fingerprint: str, fetch: "_PullJob", sources: Sequence[str]) -> None:
        """Gives buckets of this version to others from now on. It listens at the address from which
        this machine reaches the first source that answers, because others reach it there.
        """
        if self._server is None:
            host = _own_address(sources, self._answer_seconds)
            if host is not None:
                self._server = BucketServer(host, secret=secrets.token_hex(16))
        if self._server is not None:
            fetch.own_url = self._server.url
            self._server.shares[fingerprint] = fetch.share

    def _forget(self, but: str | None) -> None:
        """Gives up old versions: all but `KEPT` of them and `but`, or all with `None`. Engines of
        this machine have them mapped as long as they want.
        """
        old = [fingerprint for fingerprint in self._kept if fingerprint != but]
        if but is not None:
            old = old[:-KEPT]
        for fingerprint in old:
            if self._server is not None:
                self._server.shares.pop(fingerprint, None)
            self._kept.pop(fingerprint).close()


def _own_address(sources: Sequence[str], seconds: float) -> str | None:
    """The address of this machine from which it reaches the first source that answers."""
    for source in sources:
        url = urlsplit(source)
        at = (url.hostname or "", url.port or 0)
        try:
            with socket.create_connection(at, timeout=seconds) as reached:
                return reached.getsockname()[0]
        except OSError:
            continue
    return None


class _PullJob:
    """One version on its way into a copy."""

    def __init__(
        self,
        manifest: WeightManifest,
        copy: MachineCopy,
        sources: Sequence[str],
        *,
        answer_seconds: float,
        patience: float,
    ) -> None:
        """Reads the tree, from the copy or from a source, and finds out which buckets are in the
        copy already.
        """
        self._manifest = manifest
        self._answer_seconds = answer_seconds
        self._patience = patience
        self.own_url = ""
        self.num_bytes = 0
        self._last = time.monotonic()
        self._over = False
        self._due: dict[str, float] = {}
        tree, is_new = self._proven_tree(copy, sources)
        tensors = views(repacked(manifest.tensors), memoryview(copy.shared()))
        self._views = leaf_views(tree, manifest.tensors, tensors)
        self.transfer = Transfer(len(tree))
        for source in sources:
            self.transfer.hear_of(source, gives_last=True)
        found = set[int]()
        if not is_new:
            for number, bucket in enumerate(tree):
                if is_right(bucket, self._views[number]):
                    found.add(number)
        self.transfer.here(found)
        self.share = SharedVersion(tree, self._views, found)
        self._changed = threading.Condition()

    @property
    def is_done(self) -> bool:
        return self.transfer.is_done

    def run(self) -> None:
        """Waits until every bucket is here. See the table above."""
        asking: list[threading.Thread] = []
        for _ in range(THREADS):
            asking.append(threading.Thread(target=self._ask, name="weights-pull", daemon=True))
        for thread in asking:
            thread.start()
        try:
            self._look_on()
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            for thread in asking:
                thread.join(END_SECONDS)

    # --- Who has what -----------------------------------------------------------------------------

    def _look_on(self) -> None:
        connections = _OpenSources(self._answer_seconds)
        try:
            while not self.transfer.is_done:
                self._look(connections)
                with self._changed:
                    if self.transfer.is_lost or time.monotonic() > self._last + self._patience:
                        raise self._failed()
                    if not self.transfer.is_done:
                        self._changed.wait(LOOK_SECONDS)
        finally:
            connections.close()

    def _look(self, connections: "_OpenSources") -> None:
        """Asks the sources that are due which buckets they have, and which other sources they know.
        A new source is asked in the same round.
        """
        now = time.monotonic()
        with self._changed:
            due = [source for source in self.transfer.sources if self._due.get(source, 0.0) <= now]
        headers = {FROM: self.own_url} if self.own_url else {}
        for source in due:
            has_all = False
            try:
                answer = connections.get(source, f"{self._manifest.fingerprint}/held", headers)
                held = _held.decode(answer.read())
                named: list[str] = []
                for told in held.sources:
                    named += sources_in(told)
                with self._changed:
                    has_all = self.transfer.offers(source, held.numbers())
                    for other in named:
                        if other != self.own_url and self.transfer.hear_of(other):
                            due.append(other)
                    self._changed.notify_all()
            except SourceBusy:
                pass
            except (BucketMissing, *FAILURES) as error:
                with self._changed:
                    self.transfer.silent(source, _said(error))
            self._due[source] = now + (CALM_SECONDS if has_all else LOOK_SECONDS)

    def _failed(self) -> Exception:
        kind = WeightsCorrupt if self.transfer.blamed else EngineUnavailable
        return kind(
            f"fetching version {self._manifest.version} by pull: {self.transfer.complaint()}; what "
            "is served stays. Publish the version again."
        )

    # --- Buckets ----------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Fetches one bucket after the other, in one of the threads."""
        connections = _OpenSources(self._answer_seconds)
        try:
            while True:
                job = self._next()
                if job is None:
                    break
                source, bucket = job
                self._bring(connections, source, bucket)
        finally:
            connections.close()

    def _next(self) -> tuple[str, int] | None:
        """Waits for a bucket that a source can give. `None` at the end."""
        with self._changed:
            while not self._over and not self.transfer.is_done:
                job = self.transfer.take()
                if job is not None:
                    return job
                self._changed.wait()
            return None

    def _bring(self, connections: "_OpenSources", source: str, bucket: int) -> None:
        into = self._views[bucket]
        try:
            connections.read(source, f"{self._manifest.fingerprint}/{bucket}", into, self._moved)
        except SourceBusy:
            end = partial(self.transfer.busy, bucket)
        except (BucketMissing, *FAILURES) as error:
            end = partial(self.transfer.failed, bucket, _said(error))
        else:
            if is_right(self.share.tree[bucket], into):
                end = partial(self._arrived, bucket)
            else:
                end = partial(self._wrong, bucket, source)
        with self._changed:
            end()
            self._changed.notify_all()

    def _moved(self, num_bytes: int) -> None:
        with self._changed:
            self.num_bytes += num_bytes
            self._last = time.monotonic()

    def _arrived(self, bucket: int) -> None:
        self.transfer.arrived(bucket)
        self.share.held.add(bucket)

    def _wrong(self, bucket: int, source: str) -> None:
        self.transfer.wrong(bucket)
        _log.warning(
            "version %d by pull: %s sent wrong bytes in bucket %d",
            self._manifest.version,
            place(source),
            bucket,
        )

    # --- The tree ---------------------------------------------------------------------------------

    def _proven_tree(self, copy: MachineCopy, sources: Sequence[str]) -> tuple[Tree, bool]:
        """The version's tree, which the fingerprint proves, and True if it is new here."""
        kept = copy.tree()
        if kept:
            tree, _ = self._proven(kept)
            if tree is not None:
                return tree, False
        told = list[str]()
        connections = _OpenSources(self._answer_seconds)
        try:
            for source in sources:
                try:
                    answer = connections.get(source, f"{self._manifest.fingerprint}/tree", {})
                    tree, why = self._proven(answer.read())
                except (BucketMissing, SourceBusy, *FAILURES) as error:
                    tree = None
                    why = _said(error)
                if tree is not None:
                    copy.keep_tree(msgspec.json.encode(tree))
                    return tree, True
                told.append(f"{place(source)}: {why}")
        finally:
            connections.close()
        raise EngineUnavailable(
            f"fetching version {self._manifest.version} by pull: nobody says what it is made of "
            f"({'; '.join(told)}). Publish the version again."
        )

    def _proven(self, data: bytes) -> tuple[Tree | None, str]:
        """The tree in these bytes, or why it is not this version's."""
        try:
            tree = _tree.decode(data)
            if root(tree, self._manifest.tensors) != self._manifest.fingerprint:
                return None, "its leaves are not this version's"
        except FAILURES as error:
            return None, _said(error)
        return tree, ""


class _OpenSources:
    """The connections of one thread, which are kept open between questions."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._open: dict[str, http.client.HTTPConnection] = {}

    def get(self, source: str, path: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """Waits for the head of the answer. Raises `BucketMissing`, `SourceBusy`, or one of `FAILURES`."""
        url = urlsplit(source)
        connection = self._open.setdefault(
            source, http.client.HTTPConnection(url.hostname or "", url.port, timeout=self._seconds)
        )
        try:
            connection.request("GET", f"{url.path}/{path}", headers=dict(headers))
            answer = connection.getresponse()
            if answer.status == 200:
                return answer
            answer.read()
            if answer.status == 503:
                raise SourceBusy("it is busy")
            raise BucketMissing(f"it answers {answer.status}")
        except FAILURES:
            self._drop(source)
            raise

    def read(self, source: str, path: str, into: Views, moved: Callable[[int], None]) -> None:
        """Fills the views, one after the other. `moved` gets the number of bytes, now and then."""
        answer = self.get(source, path, {})
        try:
            size = sum(map(len, into))
            if answer.length != size:
                raise ValueError(f"it sends {answer.length} bytes of {size}")
            for view in into:
                done = 0
                while done < len(view):
                    count = answer.readinto(view[done : done + READ_BYTES])
                    if not count:
                        raise ConnectionError("its answer ended in the middle")
                    done += count
                    moved(count)
            answer.read()
        except FAILURES:
            self._drop(source)
            raise

    def close(self) -> None:
        for source in tuple(self._open):
            self._drop(source)

    def _drop(self, source: str) -> None:
        connection = self._open.pop(source, None)
        if connection is not None:
            connection.close()


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
