"""Versions that are low-rank adapters, side by side in one server: each under a name of its own,
and none ever pauses it.

A version is loaded while the server generates. A commit only says which one new requests name;
those under way go on with the one that they began with, and their tokens carry its number. One
whose weights are too old for training (I2) is aborted, and goes on elsewhere or here under the
newest. So there are never more than `Server.num_adapters` at a server, which of itself would drop
one that is in use.
"""

import asyncio
from collections.abc import Iterable, Set
from typing import Protocol, cast

from midflight import types
from midflight.engines.servers.engine import ServerEngine
from midflight.engines.servers.server import Found, Server, ServerClient, part
from midflight.engines.servers.staged import ADAPTER_PREFIX, adapter_version


class AdapterServer(Server, Protocol):
    """A server that keeps adapters beside its base. Calls wait for its answers; `EngineError` says
    what it refuses.
    """

    @property
    def num_adapters(self) -> int:
        """How many it keeps; more is the bound on age and two: the one that comes, and all that may
        still be in use.
        """
        ...

    async def load_adapter(self, client: ServerClient, name: str, folder: str) -> None: ...
    async def unload_adapter(self, client: ServerClient, name: str) -> None:
        """It may wait for requests that use it."""
        ...


def leaving(
    there: Iterable[types.Version], *, live: types.Version, coming: types.Version, room: int
) -> frozenset[types.Version]:
    """What a server with so much room has to drop for a version that comes: what was never served,
    an earlier try of the same, and the oldest of the others, but never the live one."""
    kept = sorted(
        (version for version in there if version <= live and version != coming), reverse=True
    )[: room - 1]
    return frozenset(there) - frozenset(kept)


class AdapterEngine(ServerEngine):
    """A `ServerEngine` whose server has its versions as adapters. Requests under way are never
    touched by a commit, but for old ones.
    """

    _merges = False

    @property
    def _shelf(self) -> AdapterServer:
        return cast(AdapterServer, self._server)

    async def stage(self, manifest: types.WeightManifest) -> None:
        """Waits for the transport, and for the server, which loads the version beside the others
        while it generates.
        """
        async with self._staging:
            self._next = None
            there = await self._there()
            if (manifest.version, manifest.fingerprint) == (
                self._live.version,
                self._live.fingerprint,
            ) and manifest.version in there:
                self._next = self._live
                return
            staged = await asyncio.to_thread(self._area.write_adapter, manifest)
            old = leaving(
                there,
                live=self._live.version,
                coming=manifest.version,
                room=self._shelf.num_adapters,
            )
            await self._unload(old)
            await self._shelf.load_adapter(self._client, staged.adapter, str(staged.folder))
            self._area.remove_adapters(
                but=set(map(adapter_version, (there - old) | {manifest.version}))
            )
            self._next = staged

    async def commit(self, version: types.Version) -> types.Attestation:
        """At once, paused or not. `EngineError` where the version is not staged."""
        async with self._control, self._staging:
            staged = self._staged(version)
            self._live = staged
            self._next = None
            oldest = version - (self._shelf.num_adapters - 2)
            self._abort_these(
                [r for r in self._running if r.adapter and _version(r.adapter) < oldest]
            )
            return types.Attestation(version, staged.fingerprint)

    async def health(self) -> types.EngineHealth:
        """Asks the server whether it has what new requests name. One that was started again without
        our knowing is given it.
        """
        if not self._control.locked():
            live = self._live
            if (
                live.version not in await self._there()
                and live is self._live
                and not self._control.locked()
            ):
                async with self._control:
                    await self._attach()
        return self.reading()

    async def _give_live_weights(self, found: Found) -> None:
        """Nothing that an earlier companion left there is of use: its requests are gone."""
        self._gate.clear()
        await self._unload(await self._there())
        await self._shelf.load_adapter(self._client, self._live.adapter, str(self._live.folder))

    async def _there(self) -> Set[types.Version]:
        """Those that the server has; both kinds list them as models beside the base. An answer also
        says that it lives.
        """
        listed = part(
            await self._client.get("/v1/models"), "data", of="a server that lists its models"
        )
        names = (
            str(part(model, "id", of="one whose models have names"))
            for model in cast(list[object], listed)
        )
        return {
            _version(name)
            for name in names
            if name.startswith(ADAPTER_PREFIX) and name.removeprefix(ADAPTER_PREFIX).isdecimal()
        }

    async def _unload(self, versions: Set[types.Version]) -> None:
        """Requests that still use one end here: they go on elsewhere, or here under the newest."""
        names = {adapter_version(version) for version in versions}
        for running in [r for r in self._running if r.adapter in names]:
            self._end_here(running)
            await self._abort_at_server(running.id)
        for name in sorted(names):
            await self._shelf.unload_adapter(self._client, name)


def _version(name: str) -> types.Version:
    return int(name.removeprefix(ADAPTER_PREFIX))
