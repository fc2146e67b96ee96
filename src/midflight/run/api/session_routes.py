"""`/midflight/v1/sessions` and `/claims`: for harnesses and workers outside this process, in any
language.

Opening and claiming need the control token. Scoring and ending a session need that, or the
session's owner token; the agent's own token opens neither, so an agent can't score itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.environments.claimed import Board, Offer, claims, reward_in
from midflight.environments.result_checks import checked_result, scored_roles
from midflight.errors import BadReward, NothingToClaim, RequestRejected
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.owned_sessions import OwnedRecord, OwnedSessions
from midflight.gateway.sessions.registry import SessionRegistry
from midflight.run.api.batch_lists import rows_as_lists
from midflight.run.api.service import PREFIX
from midflight.trajectories.packing import pack, to_bytes
from midflight.types import (
    Batch,
    Group,
    Json,
    Result,
    SamplingParams,
    Task,
    Trajectory,
    Version,
)
from midflight.types.generation import LEAST_TEMPERATURE, MAX_STOPS, PARAMETERS
from midflight.wire.edge import with_client
from midflight.wire.routes import (
    JSON,
    PACKED,
    StrictBody,
    bearer_of,
    body_of,
    holds,
    json_answer,
    local_address,
    route,
    wants,
)

MAX_TASK_BYTES = 64 * 2**10
"""The limit of a session's `task` as JSON: it is kept with each of up to ten thousand sessions."""
MAX_WAIT_SECONDS = 600.0
"""The limit of one request that waits; proxies cut longer ones."""

WaitSeconds = Annotated[float, Meta(ge=0, le=MAX_WAIT_SECONDS)]


def _bounds(parameter: str) -> Meta:
    """The bounds in the one list of sampling parameters."""
    bounds = PARAMETERS[parameter].range
    assert bounds is not None
    if bounds.above:
        return Meta(gt=bounds.least, le=bounds.most)
    return Meta(ge=bounds.least, le=bounds.most)


class Sampling(StrictBody, frozen=True):
    """Defaults of a session's requests. Tokens that are sampled at another temperature, or from a
    truncated distribution, are masked.
    """

    max_tokens: Annotated[int, _bounds("max_tokens")] | None = None
    min_tokens: Annotated[int, _bounds("min_tokens")] = 0
    temperature: Annotated[float, _bounds("temperature")] | None = None
    """It is 0, or `LEAST_TEMPERATURE` and more."""
    top_p: Annotated[float, _bounds("top_p")] = 1.0
    top_k: Annotated[int, _bounds("top_k")] | None = None
    min_p: Annotated[float, _bounds("min_p")] = 0.0
    stop: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=MAX_STOPS)] = []  # noqa: RUF012 (msgspec copies it)


class OpenBody(StrictBody, frozen=True):
    sampling: Sampling = Sampling()
    tracked: bool = True
    """True if the record has rows. A record without rows is only counted."""
    count_all_choices: bool = False
    """Choices (n > 1) that the agent did not go on from get rows too, and are not
    dropped(unchosen).
    """
    task: msgspec.Raw = msgspec.Raw(b"null")
    """May be anything; it comes back with the record."""


class RewardBody(StrictBody, frozen=True):
    reward: float | None
    """Required: a missing reward is no reward of None."""
    components: dict[str, float | None] = {}  # noqa: RUF012 (msgspec copies it)
    """The components, and the fields that follow, are as in `Result`."""
    metrics: dict[str, float] = {}  # noqa: RUF012 (msgspec copies it)
    turns: list[float] = []  # noqa: RUF012 (msgspec copies it)
    fields: dict[str, object] = {}  # noqa: RUF012 (msgspec copies it)
    roles: dict[str, float | None] = {}  # noqa: RUF012 (msgspec copies it)


class ClaimBody(StrictBody, frozen=True):
    max: Annotated[int, Meta(ge=1, le=1024)] = 1
    wait_seconds: WaitSeconds = 0.0


class OpenedSession(msgspec.Struct, frozen=True):
    session_id: str
    base_url: str
    api_key: str
    owner_token: str


class ClaimedTask(msgspec.Struct, frozen=True):
    id: str
    source: str
    data: Mapping[str, object]


class Claim(OpenedSession, frozen=True):
    task: ClaimedTask


class SessionRoutes:
    """Holds no state. `board` is given if the environment is `claimed`; `served` gives the version
    that engines serve.
    """

    def __init__(
        self,
        gateway: Gateway,
        owned: OwnedSessions,
        *,
        token: str,
        sampling: SamplingParams,
        served: Callable[[], Version],
        public_url: str = "",
        board: Board | None = None,
    ) -> None:
        self._gateway = gateway
        self._owned = owned
        self._board = board
        self._public_url = public_url.rstrip("/")
        self._token = token
        self._sampling = sampling
        self._served = served

    def routes(self) -> Sequence[BaseRoute]:
        return [
            route(PREFIX + "/sessions", self._open, token=self._token),
            route(PREFIX + "/sessions/{session_id}/reward", self._reward),
            route(PREFIX + "/sessions/{session_id}/end", self._end),
            route(PREFIX + "/claims", self._claim, token=self._token),
        ]

    async def _open(self, request: Request) -> Response:
        body = await body_of(request, OpenBody)
        temperature = body.sampling.temperature
        if temperature is not None and 0 < temperature < LEAST_TEMPERATURE:
            raise RequestRejected(
                f"sampling.temperature is {temperature}: send 0, or {LEAST_TEMPERATURE} and more.",
                param="sampling.temperature",
            )
        if len(body.task) > MAX_TASK_BYTES:
            raise RequestRejected(
                f"task has {len(body.task)} bytes: send {MAX_TASK_BYTES} at most, or a reference.",
                param="task",
            )
        task = _task(body.task)
        sampling = _sampling(body.sampling, self._sampling)
        handle = self._owned.open(
            sampling=sampling,
            keeps_rows=body.tracked,
            count_all_choices=body.count_all_choices,
            task=task,
        )
        return json_answer(
            self._opened(request, handle.session_id, handle.api_key, handle.owner_token)
        )

    async def _reward(self, request: Request) -> Response:
        session_id = self._checked(request)
        said = _said(await body_of(request, RewardBody), session_id)
        if self._board is not None and session_id in self._board:
            self._board.score(session_id, said)
        else:
            self._owned.score(session_id, said)
        return json_answer({"session_id": session_id, "reward": said.reward})

    async def _end(self, request: Request) -> Response:
        """A worker that ends a claimed rollout gives it up: its rows go to the trainer, and the
        worker does not get them.
        """
        session_id = self._checked(request)
        await body_of(request, StrictBody)
        if self._board is not None and session_id in self._board:
            reward = reward_in(self._board.give_up(session_id))
            return json_answer({"session_id": session_id, "reward": reward})
        kind = wants(request, (JSON, PACKED))
        if kind == PACKED and not self._owned.has_reward(session_id):
            raise RequestRejected(
                f"ending session {session_id}: a packed rollout needs its reward, and none was "
                "given; post that first, or ask for JSON."
            )
        ended = self._owned.end(session_id)
        if kind == PACKED:
            return Response(_packed(ended, self._served()), media_type=PACKED)
        return json_answer(_record(ended))

    async def _claim(self, request: Request) -> Response:
        """Waits for offers; ended by them, by `wait_seconds`, or by the worker, when it
        disconnects.
        """
        if self._board is None:
            raise NothingToClaim(
                "nothing is to be claimed here: the run's environment.entry is not "
                '"midflight.environments.claimed:claimed".'
            )
        body = await body_of(request, ClaimBody)
        offers = await with_client(
            request.receive, claims(self._board, most=body.max, wait_seconds=body.wait_seconds)
        )
        return json_answer([self._claim_of(request, offer) for offer in offers])

    def _claim_of(self, request: Request, offer: Offer) -> Claim:
        owner_token = self._gateway.registry.owner_token(offer.session_id)
        opened = self._opened(request, offer.session_id, offer.api_key, owner_token)
        task = ClaimedTask(offer.task.id, offer.task.source, offer.task.data)
        return Claim(opened.session_id, opened.base_url, opened.api_key, opened.owner_token, task)

    def _opened(
        self, request: Request, session_id: str, api_key: str, owner_token: str
    ) -> OpenedSession:
        address = self._public_url or local_address(request)
        return OpenedSession(session_id, f"{address}/s/{api_key}/v1", api_key, owner_token)

    def _checked(self, request: Request) -> str:
        """The session that the request may score and end."""
        session_id = str(request.path_params["session_id"])
        if holds(request, self._token):
            return session_id
        sessions: OwnedSessions | SessionRegistry = self._gateway.registry
        if session_id in self._owned:
            sessions = self._owned
        sessions.check_owner(session_id, bearer_of(request))
        return session_id


def _task(raw: msgspec.Raw) -> Json:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRejected(
            f"task is no JSON that could be kept: {error}. Send something plainer.", param="task"
        ) from error


def _sampling(asked: Sampling, default: SamplingParams) -> SamplingParams:
    return default.changed(
        max_tokens=default.max_tokens if asked.max_tokens is None else asked.max_tokens,
        min_tokens=asked.min_tokens,
        temperature=default.temperature if asked.temperature is None else asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        stop=tuple(asked.stop),
    )


def _said(body: RewardBody, session_id: str) -> Result:
    """Checks the result: all its numbers must be finite as float32, because rewards travel so."""
    said = Result(
        body.reward,
        body.components,
        body.metrics,
        body.turns,
        cast("dict[str, Json]", body.fields),
        body.roles,
    )
    try:
        return checked_result(said, task=Task(session_id, "session"))
    except BadReward as error:
        raise RequestRejected(str(error), param="reward") from error


def _record(ended: OwnedRecord) -> dict[str, object]:
    record = ended.record
    parts = {
        name: getattr(ended.said, name)
        for name in ("components", "metrics", "turns", "fields", "roles")
    }
    return {
        "session_id": record.session_id,
        "task": ended.task,
        "reward": ended.reward,
        **{name: part for name, part in parts.items() if part},
        "num_turns": record.num_turns,
        "num_branches": record.num_branches,
        "num_tokens": sum(row.num_trainable for row in record.rows),
        "num_rewritten": record.num_rewritten,
        "num_mismatches": record.num_mismatches,
        "failed_requests": record.failed_requests,
        "truncated": record.truncated,
        "masked": record.masked,
        "masked_by": record.masked_by,
        "replaced": record.replaced,
        "dropped": record.dropped,
        "shares": record.shares,
        "rows_given": ended.rows_given,
        "rows": rows_as_lists(record.rows),
    }


def _packed(ended: OwnedRecord, served: Version) -> bytes:
    """A batch of one group with one rollout, and one for each role that has a reward. Its `lease`
    is 0, and its `train_version` is the version served now, or a newer one that a row has.
    """
    record = ended.record
    without_reward = dict.fromkeys(record.roles.keys() - {""})
    said = replace(ended.said, roles={**without_reward, **ended.said.roles})
    roles, rows, _ = scored_roles(said, record)
    scored = {"components": said.components, "turn_rewards": tuple(said.turns), "roles": roles}
    rollout = Trajectory(
        ended.key,
        record.session_id,
        "session",
        ended.reward,
        rows,
        record.truncated,
        room=record.room,
        **cast("dict[str, Any]", scored),
    )
    newest = max((int(row.versions.max()) for row in record.rows), default=served)
    group = Group(ended.key.group, record.session_id, "session", (rollout,))
    return to_bytes(pack(Batch(0, max(served, newest), (group,))))
