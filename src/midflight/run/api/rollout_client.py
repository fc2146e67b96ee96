"""The trainer's client of the rollout process."""

from __future__ import annotations

import asyncio
import time
from typing import Self

import msgspec

from midflight.run.api.service import LIFE, PREFIX, CopyAnswer, DeviceOwner, WentOn
from midflight.run.parts import PartLost
from midflight.trajectories.packing import from_bytes
from midflight.types import PackedBatch, Version, WeightManifest
from midflight.types.facts import Stepped
from midflight.wire.client import HttpAnswer, HttpClient

AGAIN_SECONDS = 0.2
"""The wait between two requests to a rollout process that is being started again."""


class RolloutClient:
    """The `RolloutService` of another process. A lost connection is made anew once, because every
    verb may be sent again: after this process has stood still, its connections are closed. A second
    failure is `PartLost`; the launcher ends this process when the rollout process is dead.
    """

    def __init__(self, url: str, *, token: str, life: int = 0, patient: bool = False) -> None:
        """`life` is explained at `LIFE`. With `patient` the process is one that is started again
        when it dies. Then requests are repeated until it answers.
        """
        self._headers = {LIFE: str(life)}
        self._patient = patient
        # A batch may take as long as its slowest rollout, so answers have no deadline; connecting
        # has one.
        self._http = HttpClient(url, lost=_lost, token=token, connect_seconds=60)

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.__aexit__(*exc)

    async def take(self, train_version: Version) -> PackedBatch:
        packed = await self._post("take", {"train_version": train_version})
        return await asyncio.to_thread(from_bytes, packed)

    async def done(self, step: Stepped) -> None:
        await self._post("done", {**msgspec.structs.asdict(step), "now": time.monotonic()})

    async def publish(self, manifest: WeightManifest) -> None:
        await self._post("weights", manifest)

    async def turn(self, of: DeviceOwner) -> None:
        await self._post("turn", {"of": of.value})

    async def checkpointed(self, version: Version) -> None:
        await self._post("checkpointed", {"version": version})

    async def finish(self, version: Version) -> None:
        await self._post("finish", {"version": version})

    async def restart(self, checkpoint: Version, *, least: Version = 0) -> WentOn:
        """Restarts as `TrainerService` does. If it is called twice, the second call's number
        holds.
        """
        answer = await self._post("restart", {"version": checkpoint, "least": least})
        return msgspec.json.decode(answer, type=WentOn)

    async def copy_store(self, version: Version) -> CopyAnswer:
        answer = await self._post("store", {"version": version})
        return msgspec.json.decode(answer, type=CopyAnswer)

    async def _post(self, verb: str, body: object) -> bytes:
        path = f"{PREFIX}/{verb}"
        content = msgspec.json.encode(body)
        try:
            answer = await self._http.call("POST", path, content, headers=self._headers)
        except PartLost:
            answer = await self._again(path, content)
        if answer.status not in (200, 204):
            said = answer.content[:500].decode(errors="replace")
            raise PartLost(f"the rollout process answered {verb} with {answer.status}: {said}")
        return answer.content

    async def _again(self, path: str, content: bytes) -> HttpAnswer:
        """Waits for the process while it is started again; ended by its answer, or with this
        process.
        """
        while True:
            try:
                return await self._http.call("POST", path, content, headers=self._headers)
            except PartLost:
                if not self._patient:
                    raise
            await asyncio.sleep(AGAIN_SECONDS)


def _lost(what: str) -> PartLost:
    return PartLost(f"the rollout process {what}; its log says why it ended")
