"""Each token opens its own routes and no others: that of workers, that of a joined engine, those of a session, and none at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from tests.gateway.offered import ScriptedGenerator, make_gateway

from midflight.config import Config
from midflight.config.bounds import rollout_bound
from midflight.engines.app import EngineRoutes
from midflight.engines.wire import STREAM_PATH
from midflight.environments.worker_pool import WorkerPool
from midflight.gateway.answers.owned_sessions import OpenSession, OwnedSessions
from midflight.run.api.info import info_route
from midflight.run.api.membership import member_routes
from midflight.run.api.session_routes import SessionRoutes
from midflight.run.api.task_routes import tasks_route
from midflight.run.api.teacher import score_route
from midflight.run.api.trainer_routes import TrainerRoutes
from midflight.run.api.worker_routes import WorkerRoutes
from midflight.run.api.worker_wire import BLOCKED_PATH, PATH
from midflight.run.rollout.version_followers import served_route
from midflight.testing.scripted import ScriptedEngine
from midflight.types import SamplingParams
from midflight.types.facts import record_nothing
from midflight.wire.edge import RequireToken

CONTROL, WORKER, ENGINE = "the-control-token-of-this-test", "the-worker-token-of-this-test", "the-token-of-a-joined-engine"
OWNED = ("/reward", "/end")
"""Ends of the routes of a session, which its owner's token opens."""


class Site:
    """All routes of a rollout process that are behind a token."""

    def __init__(self) -> None:
        gateway = make_gateway(ScriptedGenerator(), record_nothing, anonymous=False, max_sessions=10)
        self.owned = OwnedSessions(gateway, session_seconds=100.0)
        nothing: Any = None
        sampling = SamplingParams(max_tokens=8)
        sessions = SessionRoutes(gateway, self.owned, token=CONTROL, sampling=sampling, served=lambda: 0, board=nothing)
        trainer = TrainerRoutes(nothing, token=CONTROL, model=Path("m"), start_version=0, served=lambda: 0, finished=lambda: None)
        bound = partial(rollout_bound, Config().environment)
        info = info_route(Config(), purpose="rollouts", model="m", max_context=64, served=lambda: 0, bound=bound, token=CONTROL)
        self.workers = WorkerRoutes(WorkerPool(nothing, stall_seconds=100.0), token=WORKER, control_token=CONTROL)
        self.routes: Sequence[BaseRoute] = [
            info,
            *sessions.routes(),
            *trainer.routes(),
            *member_routes(nothing, token=CONTROL),
            *self.workers.routes(),
            tasks_route(nothing, token=CONTROL),
            score_route(nothing, token=CONTROL),
            served_route(nothing, token=CONTROL),
        ]
        self.client = TestClient(Starlette(routes=self.routes), raise_server_exceptions=False)

    def status(self, route: Route, token: str | None, *, session: str) -> int:
        """The status of a request with an empty body."""
        path = route.path.replace("{session_id}", session).replace("{name}", "x").replace("{name:path}", "x")
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        (method,) = (route.methods or set[str]()) - {"HEAD"}
        return self.client.request(method, path, headers=headers, json=None if method in ("GET", "DELETE") else {}).status_code


@pytest.fixture
def site() -> Site:
    return Site()


def opened_by(site: Site, token: str | None, *, session: str = "s") -> set[str]:
    """The routes that ask no further."""
    plain = [route for route in site.routes if isinstance(route, Route)]
    assert len(plain) > 15
    return {route.path for route in plain if site.status(route, token, session=session) != 401}


@pytest.mark.parametrize("token", [None, "", ENGINE, "wrong", CONTROL[:-1]])
def test_no_token_and_that_of_a_joined_engine_open_nothing(site: Site, token: str | None) -> None:
    assert opened_by(site, token) == set()


def test_the_token_of_workers_opens_what_a_worker_says_and_nothing_else(site: Site) -> None:
    assert opened_by(site, WORKER) == {BLOCKED_PATH}


def test_the_control_token_opens_all_but_what_workers_say(site: Site) -> None:
    sessions = {route.path for route in site.routes if isinstance(route, Route) and route.path.endswith(OWNED)}
    others = {route.path for route in site.routes if isinstance(route, Route)} - {BLOCKED_PATH}
    assert others - opened_by(site, CONTROL) <= sessions, "which belong to the session's owner"


async def opened(site: Site) -> OpenSession:
    return site.owned.open(sampling=SamplingParams(max_tokens=8), keeps_rows=False)


def test_the_tokens_of_a_session_open_its_own_end_and_no_other_route(site: Site) -> None:
    mine, other = asyncio.run(opened(site)), asyncio.run(opened(site))
    owners = {route.path for route in site.routes if isinstance(route, Route) and route.path.endswith(OWNED)}
    assert opened_by(site, mine.api_key, session=mine.session_id) == set()
    assert opened_by(site, other.owner_token, session=mine.session_id) == set()
    assert opened_by(site, mine.owner_token, session=mine.session_id) == owners


@pytest.mark.parametrize("token", [None, ENGINE, CONTROL])
def test_rollouts_are_given_to_workers_alone(site: Site, token: str | None) -> None:
    assert [route.path for route in site.routes if isinstance(route, WebSocketRoute)] == [PATH]
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    with pytest.raises(WebSocketDisconnect) as closed, site.client.websocket_connect(PATH, headers=headers):
        pass
    assert closed.value.code == 1008


@pytest.mark.parametrize("token", [None, WORKER, "wrong"])
def test_a_joined_engine_answers_its_own_token_alone(token: str | None) -> None:
    async def serve(*_: object) -> None: ...

    routes = EngineRoutes(cast(Any, ScriptedEngine("e")), cast(Any, serve)).wire()
    client = TestClient(RequireToken(Starlette(routes=routes), ENGINE), raise_server_exceptions=False)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    plain = [route for route in routes if isinstance(route, Route)]
    assert len(plain) > 6
    for route in plain:
        (method,) = (route.methods or set[str]()) - {"HEAD"}
        assert client.request(method, route.path, headers=headers).status_code == 401
    with pytest.raises(WebSocketDisconnect), client.websocket_connect(STREAM_PATH, headers=headers):
        pass
