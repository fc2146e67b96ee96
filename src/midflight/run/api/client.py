"""The trainer's side of the wire: `RolloutService` over HTTP."""

from __future__ import annotations

from types import TracebackType

import aiohttp
import msgspec

from midflight.run.parts import PartLost
from midflight.run.service import PREFIX, StepDone
from midflight.trajectories.packing import from_bytes
from midflight.types import PackedBatch, Version, WeightManifest


class RolloutClient:
    """Talks to `/midflight/v1` of a rollout process. A dead rollout process is an error at once, never a wait."""

    def __init__(self, url: str, *, token: str) -> None:
        self._url = url.rstrip("/") + PREFIX
        self._token = token

    async def __aenter__(self) -> RolloutClient:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=60)  # a batch may take as long as its slowest rollout
        self._http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._token}"}, timeout=timeout)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._http.close()

    async def take(self, train_version: Version) -> PackedBatch:
        return from_bytes(await self._post("take", msgspec.json.encode({"train_version": train_version})))

    async def done(self, report: StepDone) -> None:
        await self._post("done", msgspec.json.encode(report))

    async def publish(self, manifest: WeightManifest) -> None:
        await self._post("weights", msgspec.json.encode(manifest))

    async def checkpointed(self, version: Version) -> None:
        await self._post("checkpointed", msgspec.json.encode({"version": version}))

    async def finish(self, version: Version) -> None:
        await self._post("finish", msgspec.json.encode({"version": version}))

    async def _post(self, verb: str, body: bytes) -> bytes:
        try:
            async with self._http.post(f"{self._url}/{verb}", data=body) as response:
                answer = await response.read()
        except aiohttp.ClientError as error:
            raise PartLost(f"asking the rollout process to {verb} failed: {error}; its log says why it ended") from error
        if response.status != 200:
            raise PartLost(f"the rollout process answered {verb} with {response.status}: {answer[:500].decode(errors='replace')}")
        return answer
