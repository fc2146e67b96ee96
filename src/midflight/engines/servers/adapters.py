"""Versions that are low-rank adapters, side by side in one server. Each has a name of its own, and
loading one never pauses the server.

A version is loaded while the server generates. A commit only says which version new requests name.
Requests under way go on with the version that they began with, and their tokens carry its number. A
request whose weights are too old for training (I2) is aborted, and goes on elsewhere or here under
the newest. So there are never more than `Server.num_adapters` adapters at a server, which would
otherwise drop one that is in use.
"""

import asyncio
from collections.abc import Iterable, Set
from typing import Protocol, cast

from midflight import types
from midflight.engines.servers.engine import ServerEngine
from midflight.engines.servers.server import Server, ServerClient, ServerDescription, part
from midflight.engines.servers.staged import ADAPTER_PREFIX, adapter_version


class AdapterServer(Server, Protocol):
    """A server that keeps adapters beside its base. Calls wait for its answers. They raise
    `EngineError` if the server refuses.
    """

    @property
    def num_adapters(self) -> int:
        """The number of adapters that the server keeps: the bound on age and two more. These are
        the adapter that comes, and all that may still be in use.
        """
        ...

    async def load_adapter(self, client: ServerClient, name: str, folder: str) -> None: ...
    async def unload_adapter(self, client: ServerClient, name: str) -> None:
        """The server may wait for requests that use the adapter."""
        ...


def leaving(
    there: Iterable[types.Version], *, live: types.Version, coming: types.Version, room: int
) -> frozenset[types.Version]:
    """The versions that a server with so much room has to drop for a version that comes. They are
    those that were never served, an earlier try of the same version, and the oldest of the others.
    The live version is never among them.
    """
    there = frozenset(there)
    may_stay = [version for version in there if version <= live and version != coming]
    newest_first = sorted(may_stay, reverse=True)
    return there - frozenset(newest_first[: room - 1])


class AdapterEngine(ServerEngine):
    """A `ServerEngine` whose server has its versions as adapters. A commit touches no requests
    under way, except those whose weights are too old.
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
            live = self._live
            is_live = manifest.version == live.version and manifest.fingerprint == live.fingerprint
            if is_live and manifest.version in there:
                self._next = live
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
            kept = (there - old) | {manifest.version}
            self._area.remove_adapters(but={adapter_version(version) for version in kept})
            self._next = staged

    async def commit(self, version: types.Version) -> types.Attestation:
        """Commits at once, paused or not, for new requests. Raises `EngineError` if the version is
        not staged.
        """
        async with self._control, self._staging:
            staged = self._staged(version)
            self._live = staged
            self._next = None
            oldest = version - (self._shelf.num_adapters - 2)
            named = [running for running in self._running if running.adapter]
            self._abort_these([r for r in named if _version(r.adapter) < oldest])
            return types.Attestation(version, staged.fingerprint, still_seconds=0.0)

    async def health(self) -> types.EngineHealth:
        """Asks the server whether it has the version that new requests name. A server that was
        started again without our knowing is given the version.
        """
        if not self._control.locked():
            live = self._live
            is_missing = live.version not in await self._there()
            if is_missing and live is self._live and not self._control.locked():
                async with self._control:
                    await self._attach()
        return self.reading()

    async def _give_live_weights(self, found: ServerDescription) -> None:
        """Drops all that an earlier companion left at the server, because its requests are gone,
        and loads the live version.
        """
        self._gate.clear()
        await self._unload(await self._there())
        await self._shelf.load_adapter(self._client, self._live.adapter, str(self._live.folder))

    async def _there(self) -> Set[types.Version]:
        """The versions that the server has. Both kinds list them as models beside the base. An
        answer also says that the server lives.
        """
        answer = await self._client.get("/v1/models")
        listed = part(answer, "data", of="a server that lists its models")
        versions = set[types.Version]()
        for model in cast(list[object], listed):
            name = str(part(model, "id", of="one whose models have names"))
            if name.startswith(ADAPTER_PREFIX) and name.removeprefix(ADAPTER_PREFIX).isdecimal():
                versions.add(_version(name))
        return versions

    async def _unload(self, versions: Set[types.Version]) -> None:
        """Drops versions from the server. Requests that still use one of them end here, and go on
        elsewhere, or here under the newest.
        """
        names = {adapter_version(version) for version in versions}
        for running in [r for r in self._running if r.adapter in names]:
            self._end_here(running)
            await self._abort_at_server(running.id)
        for name in sorted(names):
            await self._shelf.unload_adapter(self._client, name)


def _version(name: str) -> types.Version:
    return int(name.removeprefix(ADAPTER_PREFIX))
