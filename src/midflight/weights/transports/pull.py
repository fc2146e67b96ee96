"""The engine's end of the pull transport: buckets from whoever has them, several at once, each
checked before it counts.

    manifest -> the machine's copy -> tree -> what of it is here already -> buckets from sources ->
    the copy, for engines to map
                                                                              and given away
                                                                              meanwhile

No group is made, so nobody waits for anybody else: an engine that dies, or comes later, concerns
its own transfer only. Torch-free.

| wait | waits for | ended by |
|---|---|---|
| `MachineCopy.of` | another engine of this machine that fetches the same | its end, or `patience` |
| an answer | a source | it, or `answer_seconds` without a byte |
| `_Fetch.run` | its threads, which fetch; those who may get more buckets | all buckets; nobody left to ask; `patience` seconds without a megabyte |
"""

import http.client
import logging
import secrets
import socket
import tempfile
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
from midflight.weights.transports.files import SHARED, remove_stale
from midflight.weights.transports.machine_copy import PREFIX, MachineCopy
from midflight.weights.transports.sharing import FROM, BucketServer, Held, SharedVersion
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
"""That fetch: twice what one source is asked for at once."""
LOOK_SECONDS = 0.1
CALM_SECONDS = 1.0
"""Between two questions what a source has: of one that gets more, or had too much to do, and of one
that has all.
"""
END_SECONDS = 1.0
"""For a thread that is still in a failed transfer's last question."""
READ_BYTES = 2**20
"""After which a transfer counts as alive: a slow network has a bucket under way for minutes."""
KEPT = 1
"""Versions given away beside the one that is being fetched: the one that is served."""
FAILURES = (OSError, http.client.HTTPException, msgspec.MsgspecError, ValueError)

_log = logging.getLogger(__name__)
_held = msgspec.json.Decoder(Held)
_tree = msgspec.json.Decoder(Tree)


class NotHere(Exception):
    """The source does not have what was asked for."""


class Busy(Exception):
    """The source has too many to serve."""


class PullReceiver:
    """Implements `ports.WeightReceiver`. What it has it gives away, until it has fetched another
    version after the next.

    The caller gets the machine's copy mapped as its own memory: engines of one machine have one
    copy of a version between them.
    """

    def __init__(
        self,
        *,
        answer_seconds: float = 10.0,
        patience: float = 20.0,
        places: Sequence[Path] | None = None,
    ) -> None:
        """`answer_seconds`: without a byte from a source after which it has failed. `patience`:
        seconds without a megabyte after which the transfer has. `places`: where the machine's copy
        may lie, the best first; default /dev/shm, then the temporary folder."""
        self._answer_seconds = answer_seconds
        self._patience = patience
        self._places = list(places) if places is not None else [SHARED, Path(tempfile.gettempdir())]
        self._server: BucketServer | None = None
        self._kept: dict[str, MachineCopy] = {}
        self.blamed = Counter[str]()
        """How often a source, as host:port, sent wrong bytes."""
        self.num_bytes = 0
        """That came over the network."""
        for folder in self._places:
            remove_stale(PREFIX, folder=folder)

    def fetch(self, manifest: WeightManifest) -> Mapping[str, memoryview]:
        """Bytes of each tensor by name. `WeightsCorrupt` or `EngineUnavailable` when nobody has
        what is missing; what an engine serves stays as it is. One `fetch` at a time."""
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
            # what another had found whole is not: from here on it is this one's to write
            copy.close()

    def close(self) -> None:
        """Gives nothing away any more. What callers have stays theirs."""
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
        """Whether all is there and right now; `False` only where another engine said so and was
        wrong.
        """
        fetch = _Fetch(
            manifest, copy, sources, answer_seconds=self._answer_seconds, patience=self._patience
        )
        try:
            if not fetch.is_done and not copy.is_alone:
                return False
            if not fetch.is_done:
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

    def _give(self, fingerprint: str, fetch: "_Fetch", sources: Sequence[str]) -> None:
        """From now on others get what is here. Listens where this machine reaches the first source
        that answers: there others reach it.
        """
        if (
            self._server is None
            and (host := _own_address(sources, self._answer_seconds)) is not None
        ):
            self._server = BucketServer(host, secret=secrets.token_hex(16))
        if self._server is not None:
            fetch.own_url = self._server.url
            self._server.shares[fingerprint] = fetch.share

    def _forget(self, but: str | None) -> None:
        """Old versions; engines of this machine have them mapped as long as they want."""
        for old in [f for f in self._kept if f != but][: -KEPT if but is not None else None]:
            if self._server is not None:
                self._server.shares.pop(old, None)
            self._kept.pop(old).close()


def _own_address(sources: Sequence[str], seconds: float) -> str | None:
    for source in sources:
        url = urlsplit(source)
        try:
            with socket.create_connection(
                (url.hostname or "", url.port or 0), timeout=seconds
            ) as reached:
                return reached.getsockname()[0]
        except OSError:
            continue
    return None


class _Fetch:
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
        """Reads the tree, from the copy or from a source, and what of the version is in the copy
        already.
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
        found = (
            set[int]()
            if is_new
            else {i for i, bucket in enumerate(tree) if is_right(bucket, self._views[i])}
        )
        self.transfer.here(found)
        self.share = SharedVersion(tree, self._views, found)
        self._changed = threading.Condition()

    @property
    def is_done(self) -> bool:
        return self.transfer.is_done

    def run(self) -> None:
        """Waits until every bucket is here. See the table above."""
        asking = [
            threading.Thread(target=self._ask, name="weights-pull", daemon=True)
            for _ in range(THREADS)
        ]
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
        """Asks those whose turn it is what they have, and whom else they know."""
        now = time.monotonic()
        with self._changed:
            due = [source for source in self.transfer.sources if self._due.get(source, 0.0) <= now]
        for source in due:
            has_all = False
            try:
                answer = connections.get(
                    source,
                    f"{self._manifest.fingerprint}/held",
                    {FROM: self.own_url} if self.own_url else {},
                )
                held = _held.decode(answer.read())
                new = [
                    found
                    for told in held.sources
                    for found in sources_in(told)
                    if found != self.own_url
                ]
                with self._changed:
                    has_all = self.transfer.offers(source, held.numbers())
                    due += [found for found in new if self.transfer.hear_of(found)]
                    self._changed.notify_all()
            except Busy:
                pass
            except (NotHere, *FAILURES) as error:
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
        """One of the threads: a bucket after the other."""
        connections = _OpenSources(self._answer_seconds)
        try:
            while (job := self._next()) is not None:
                self._bring(connections, *job)
        finally:
            connections.close()

    def _next(self) -> tuple[str, int] | None:
        """Waits for a bucket that somebody can give; `None` at the end."""
        with self._changed:
            while not self._over and not self.transfer.is_done:
                if (job := self.transfer.take()) is not None:
                    return job
                self._changed.wait()
            return None

    def _bring(self, connections: "_OpenSources", source: str, bucket: int) -> None:
        into = self._views[bucket]
        try:
            connections.read(source, f"{self._manifest.fingerprint}/{bucket}", into, self._moved)
        except Busy:
            end = partial(self.transfer.busy, bucket)
        except (NotHere, *FAILURES) as error:
            end = partial(self.transfer.failed, bucket, _said(error))
        else:
            end = partial(
                self._arrived if is_right(self.share.tree[bucket], into) else self._wrong,
                bucket,
                source,
            )
        with self._changed:
            end()
            self._changed.notify_all()

    def _moved(self, num_bytes: int) -> None:
        with self._changed:
            self.num_bytes += num_bytes
            self._last = time.monotonic()

    def _arrived(self, bucket: int, source: str) -> None:
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
        """And whether it is new here. It is proven by the fingerprint."""
        kept = copy.tree()
        if kept and (tree := self._proven(kept)[0]) is not None:
            return tree, False
        told = list[str]()
        connections = _OpenSources(self._answer_seconds)
        try:
            for source in sources:
                try:
                    tree, why = self._proven(
                        connections.get(source, f"{self._manifest.fingerprint}/tree", {}).read()
                    )
                except (NotHere, Busy, *FAILURES) as error:
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
        try:
            tree = _tree.decode(data)
            if root(tree, self._manifest.tensors) != self._manifest.fingerprint:
                return None, "its leaves are not this version's"
        except FAILURES as error:
            return None, _said(error)
        return tree, ""


class _OpenSources:
    """Of one thread, kept open between questions."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._open: dict[str, http.client.HTTPConnection] = {}

    def get(self, source: str, path: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """Waits for the head of the answer. `NotHere`, `Busy`, or one of `FAILURES`."""
        url = urlsplit(source)
        connection = self._open.setdefault(
            source, http.client.HTTPConnection(url.hostname or "", url.port, timeout=self._seconds)
        )
        try:
            connection.request("GET", f"{url.path}/{path}", headers=dict(headers))
            answer = connection.getresponse()
            if answer.status != 200:
                answer.read()
                raise (
                    Busy("it is busy")
                    if answer.status == 503
                    else NotHere(f"it answers {answer.status}")
                )
            return answer
        except FAILURES:
            self._drop(source)
            raise

    def read(self, source: str, path: str, into: Views, moved: Callable[[int], None]) -> None:
        """Fills the views, one after the other; `moved` gets the number of bytes, now and then."""
        answer = self.get(source, path, {})
        try:
            if answer.length != sum(map(len, into)):
                raise ValueError(f"it sends {answer.length} bytes of {sum(map(len, into))}")
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
        if (connection := self._open.pop(source, None)) is not None:
            connection.close()


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
