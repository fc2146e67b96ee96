"""Weights that come straight into a server's workers, by the server's own routes: received by our
plugin there while the server generates, or by the server's own transfer engine.

The companion gives orders and asks what the workers hold. With the plugin, and with an engine that
stages, the workers only exchange in the pause the weights that they serve for those that have come.
Another engine receives in the pause.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

from midflight.engines.servers.own_engines import OWN_ENGINES, TORCH_NAMES, OwnEngine
from midflight.engines.servers.plugin_workers import WORKERS
from midflight.engines.servers.server import ServerClient
from midflight.errors import EngineError, EngineUnavailable
from midflight.ports import WorkerFeed
from midflight.types import Version, WeightManifest

_log = logging.getLogger(__name__)
TRANSPORT = "direct"


class DirectLoader:
    """Decides which versions come straight to one server's workers, and brings them."""

    def __init__(self, kind: str, feed: WorkerFeed, *, by_own_engine: bool = False) -> None:
        """With `by_own_engine` the server's own transfer engine receives versions."""
        self._make = WORKERS[kind]
        self._make_own = OWN_ENGINES[kind] if by_own_engine else None
        self._own: OwnEngine | None = None
        """Made for the first version."""
        self._coming: WeightManifest | None = None
        """The version that the server's own engine serves next."""
        self._is_staged = False
        """True if it has come beside the weights that are served. Otherwise it comes in the pause."""
        self._feed = feed
        self._is_open: bool | None = None
        """True if the server can receive in this way. It is known after the first version."""
        self._changes = False
        """True if differences may be sent to the server."""
        self._keeps = False
        """True if an update by the server's own engine can be taken back."""
        self._stages = False
        """True if that engine can bring it while the server generates."""
        self._said = set[str]()

    @property
    def swaps(self) -> bool:
        """True if versions come while the server generates, so that a commit only swaps them."""
        return self._make_own is None

    async def opens(
        self, client: ServerClient, manifest: WeightManifest, *, same_names: bool
    ) -> bool:
        """True if this version goes straight to the workers. Otherwise it is written as a folder
        like every other, and the log says why.
        """
        if manifest.transport != TRANSPORT:
            return False
        if not same_names:
            return self._closed(client, "its tensors have other names, or are adapters")
        if not self._is_open:
            try:
                states = await self._make(client).states()
            except EngineUnavailable:
                raise
            except EngineError as error:
                return self._closed(client, str(error))
            self._is_open = len(states) > 0
            self._changes = all(state.held is not None for state in states)
            self._keeps = all(state.keeps for state in states)
            self._stages = all(state.stages for state in states)
        if self._make_own is not None:
            return self._opens_for_own_engine(client, manifest)
        if manifest.deltas and not self._changes:
            return self._closed(
                client, "it is a difference, for which the server's interpreter must have xxhash"
            )
        return True

    def _opens_for_own_engine(self, client: ServerClient, manifest: WeightManifest) -> bool:
        if manifest.deltas:
            return self._closed(client, "it is a difference, which no server's own engine takes")
        others = {spec.dtype for spec in manifest.tensors} - TORCH_NAMES.keys()
        if others:
            return self._closed(client, f"it has numbers of {sorted(others)[0]}")
        if not self._keeps:
            return self._closed(
                client,
                "its model keeps weights where our plugin cannot put old ones back, as quantised "
                "models do",
            )
        return True

    async def bring(self, client: ServerClient, manifest: WeightManifest) -> None:
        """Waits until each worker holds the version. The server generates meanwhile. For an own
        engine that does not stage, the version stays with the trainer until `take`.
        """
        if self._make_own is None:
            await self._feed.bring(manifest, self._make(client))
            return
        self._coming = replace(manifest, receivers=1)  # each server takes it in its own time
        self._is_staged = False
        if self._stages:
            own = self._own_engine(client)
            own.is_beside = True
            async with self._ending(own):
                await self._feed.bring(self._coming, own)
            self._is_staged = True

    async def take(self, client: ServerClient, version: Version, *, recompute: bool) -> None:
        """Serves the version that was brought, or goes back to the one that was served before it.
        Called in a pause, or between two steps.
        """
        if self._make_own is None:
            await self._make(client).take(version, recompute=recompute)
            return
        own = self._own_engine(client)
        coming = self._coming
        if coming is None or coming.version != version:
            await own.take(version, recompute=recompute)
            return
        is_staged = self._is_staged
        self._is_staged = False  # a swap that fails is not tried again
        async with self._ending(own):
            if not is_staged:
                own.is_beside = False
                await self._feed.bring(coming, own)
            await own.serve(version, recompute=recompute)
        self._coming = None

    def _own_engine(self, client: ServerClient) -> OwnEngine:
        assert self._make_own is not None
        if self._own is None:
            self._own = self._make_own(client)
        return self._own

    @asynccontextmanager
    async def _ending(self, own: OwnEngine) -> AsyncGenerator[None]:
        """Ends an update that fails in the block."""
        try:
            yield
        except EngineError:
            await own.abandon()
            raise
        except BaseException:
            self._own = None  # what the server has of the version is not known
            raise

    async def let_go(self, client: ServerClient) -> None:
        """Lets the workers give back the memory of weights that are not served. The last version
        cannot be taken back any more.
        """
        if self._is_open and self._make_own is None:
            await self._make(client).let_go()

    def _closed(self, client: ServerClient, why: str) -> bool:
        """Returns false, and logs each reason once."""
        if why not in self._said:
            _log.warning(
                "engine %s gets its weights from a folder and not straight from the trainer: %s",
                client.name,
                why,
            )
            self._said.add(why)
        return False
