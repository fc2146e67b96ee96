"""`GET /midflight/v1`: the name and state of the process that answers, for clients of any language.

`API_VERSION` counts up when a client of the version before would no longer work; fields may be
added to answers without that.
"""

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.config.bounds import RolloutBound
from midflight.config.sections import Config
from midflight.run.api.service import PREFIX
from midflight.types import Version
from midflight.wire.routes import json_answer, route

API_VERSION = 1


class Info(msgspec.Struct, frozen=True):
    """The name and state of the process that answers at this address."""

    api_version: int
    run: str
    purpose: str
    model: str
    """The model id that agents use."""
    model_path: str
    """Folder of the weights that the run began with."""
    served_version: Version
    max_staleness: int
    groups_per_step: int
    group_size: int
    max_tokens: int
    temperature: float
    max_context: int
    rollout_seconds: float
    """Seconds that the agent of a claimed rollout may take by itself."""
    max_rollout_seconds: float
    """The last bound on a whole rollout, as of now."""
    steps: int


def info_route(
    config: Config,
    *,
    purpose: str,
    model: str,
    max_context: int,
    served: Callable[[], Version],
    bound: Callable[[], RolloutBound],
    token: str,
) -> BaseRoute:
    """`GET /midflight/v1`. `bound` gives the last bound on a rollout, as of now."""

    async def info(request: Request) -> Response:
        return json_answer(
            Info(
                api_version=API_VERSION,
                run=config.run.name,
                purpose=purpose,
                model=config.model.name,
                model_path=model,
                served_version=served(),
                max_staleness=config.rollout.max_staleness,
                groups_per_step=config.rollout.groups_per_step,
                group_size=config.rollout.group_size,
                max_tokens=config.environment.max_tokens,
                temperature=config.environment.temperature,
                max_context=max_context,
                rollout_seconds=config.environment.rollout_seconds,
                max_rollout_seconds=bound().seconds,
                steps=config.run.steps,
            )
        )

    return route(PREFIX, info, token=token, method="GET")
