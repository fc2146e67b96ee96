"""`POST /update_weights_from_disk`, as SGLang's clients send it: weights from a folder, for
endpoints that have no trainer.
"""

import asyncio
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.errors import RequestRejected
from midflight.gateway.fleet.fleet import Fleet
from midflight.run.api.model_tensors import ModelTensors
from midflight.types import Version, WeightManifest
from midflight.weights.handover import Handover
from midflight.weights.transports.posted_files import manifest_of
from midflight.wire.routes import body_of, json_answer, route

_FILE = "model.safetensors"


class DiskWeightsBody(msgspec.Struct, frozen=True):
    """The fields of the request that we use. SGLang's other fields say how its own server loads the
    weights; they are ignored.
    """

    model_path: str
    weight_version: str | None = None


class DiskWeights:
    """Brings the weights of a folder to all engines, by the same handover as trained versions:
    requests under way go on.
    """

    def __init__(self, model: Path, fleet: Fleet, handover: Handover) -> None:
        """`model` is the folder that the engines started with; new weights must have its tensors."""
        self._model = model
        self._fleet = fleet
        self._handover = handover
        self._one_at_a_time = asyncio.Lock()

    def route(self, token: str | None) -> BaseRoute:
        return route("/update_weights_from_disk", self._update, token=token)

    async def _update(self, request: Request) -> Response:
        """Waits for the engines. The file must stay until the next one comes: an engine that is
        started again reads it.
        """
        body = await body_of(request, DiskWeightsBody)
        async with self._one_at_a_time:
            version = self._next(body.weight_version)
            manifest = await asyncio.to_thread(self._manifest, Path(body.model_path), version)
            report = await self._handover.publish(manifest)
        lost = "; ".join(f"{name}: {why}" for name, why in report.quarantined.items())
        message = f"version {version} is served"
        if lost:
            message += f", but not by {lost}"
        answer = {
            "success": not lost,
            "message": message,
            "num_paused_requests": 0,
            "weight_version": str(version),
        }
        return json_answer(answer, status=400 if lost else 200)

    def _next(self, asked: str | None) -> Version:
        """The version of the new weights. Versions only grow, because they tell tokens apart."""
        current = self._fleet.current_version()
        if asked is None or asked == "default":
            return current + 1
        if not asked.isdecimal() or not current < int(asked[:20]) < 2**31:
            raise RequestRejected(
                f"weight_version is {asked[:80]!r}, and version {current} is served: send a larger "
                "whole number, or leave it out.",
                param="weight_version",
            )
        return int(asked)

    def _manifest(self, path: Path, version: Version) -> WeightManifest:
        """Returns the manifest of the weights in the folder. It blocks."""
        file = path / _FILE if path.is_dir() else path
        if not file.is_file():
            raise RequestRejected(
                f"model_path is {str(path)[:200]!r}: there is no {_FILE}. Save the weights in "
                "one file.",
                param="model_path",
            )
        return manifest_of(file, version=version, fitting=ModelTensors.of(self._model).fitting)
