"""`/midflight/v1` over HTTP: who may do what, what it answers, and that no secret is ever shown."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from tests.facts import Facts
from tests.gateway.offered import RecordingControl, ScriptedGenerator, make_gateway

from midflight.config.bounds import rollout_bound
from midflight.config.sections import Config
from midflight.environments.agents import hide_secrets
from midflight.environments.claimed import Claimed
from midflight.errors import UnknownLease
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.owned_sessions import OwnedSessions
from midflight.gateway.http.http import build_app
from midflight.run.api.info import info_route
from midflight.run.api.session_routes import SessionRoutes
from midflight.run.api.task_routes import tasks_route
from midflight.run.api.trainer_routes import TrainerRoutes
from midflight.testing.virtual_time import run_virtual
from midflight.trajectories.packing import from_bytes, pack
from midflight.types import (
    Batch,
    Group,
    GroupKey,
    PackedBatch,
    Result,
    RolloutKey,
    Row,
    SamplingParams,
    Task,
    Trajectory,
    Version,
    WeightManifest,
)
from midflight.types.facts import Record, Stepped, record_nothing
from midflight.wire.memory import MemoryTransport

TOKEN = "the-control-token-of-this-test"
CONTROL = {"authorization": f"Bearer {TOKEN}"}
API = "/midflight/v1"
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def one_batch(train_version: Version) -> PackedBatch:
    """Two groups of one; the second rollout has no rows."""
    row = Row(
        np.array([1, 2, 3], np.int32), np.array([0, 1, 1], bool), np.array([0, 1, 1], bool), np.array([0, -0.5, -1.5], np.float32),
        np.zeros(3, np.int32), np.zeros(3, np.int32),
    )  # fmt: skip
    keys = [RolloutKey(GroupKey(0, index), 0) for index in range(2)]
    rollouts = [Trajectory(keys[0], "a", "s", 1.0, (row,), room=6), Trajectory(keys[1], "b", "s", 0.25, (), truncated=True)]
    return pack(Batch(3, train_version, tuple(Group(t.key.group, t.task_id, "s", (t,)) for t in rollouts)))


class Service:
    """A `TrainerService` whose batch comes after `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.said: list[object] = []
        self.over = False

    async def take(self, train_version: Version) -> PackedBatch:
        await asyncio.sleep(self.seconds)
        return one_batch(train_version)

    async def take_within(self, train_version: Version, *, seconds: float) -> PackedBatch | None:
        return await self.take(train_version) if self.seconds <= seconds else await asyncio.sleep(seconds)

    async def done(self, report: Stepped) -> None:
        if report in self.said:
            raise UnknownLease("twice")
        self.said.append(report)

    async def publish(self, manifest: WeightManifest) -> None:
        self.said.append(manifest)

    async def checkpointed(self, version: Version) -> None:
        self.said.append(("checkpointed", version))

    async def finish(self, version: Version) -> None:
        self.said.append(("finish", version))

    async def take_back(self, lease: int) -> None:
        self.said.append(("take_back", lease))

    async def restart(self, checkpoint: Version, *, least: Version = 0) -> Version:
        self.said.append(("restart", checkpoint))
        return 9

    def post(self, rows: Sequence[dict[str, Any]]) -> tuple[range, int]:
        self.said.append(("tasks", *rows))
        return range(4, 4 + len(rows)), 7


@dataclass
class Site:
    http: httpx2.AsyncClient
    gateway: Gateway
    service: Service
    environment: Claimed
    finished: asyncio.Event

    async def post(self, path: str, body: Any = None, *, token: str = TOKEN, **headers: str) -> httpx2.Response:
        return await self.http.post(API + path, json={} if body is None else body, headers={"authorization": f"Bearer {token}", **headers})


@asynccontextmanager
async def site(
    *, service: Service | None = None, max_sessions: int = 10, record: Record = record_nothing, model: Path = Path("none")
) -> AsyncIterator[Site]:
    service, environment, finished = service or Service(), Claimed(), asyncio.Event()
    gateway = make_gateway(ScriptedGenerator(), record, anonymous=False, max_sessions=max_sessions)
    owned = OwnedSessions(gateway, session_seconds=100.0)
    sessions = SessionRoutes(gateway, owned, token=TOKEN, sampling=SamplingParams(max_tokens=8), served=lambda: 5, board=environment.board)
    trainer = TrainerRoutes(service, token=TOKEN, model=model, start_version=0, served=lambda: 1, finished=finished.set)
    made = Config()
    bound = partial(rollout_bound, made.environment)
    info = info_route(made, purpose="rollouts", model="/model", max_context=256, served=lambda: 1, bound=bound, token=TOKEN)
    posting = tasks_route(service.post, token=TOKEN)
    app = build_app(gateway, RecordingControl(), control_token=TOKEN, extra_routes=[info, *sessions.routes(), *trainer.routes(), posting])
    async with asyncio.TaskGroup() as tasks, httpx2.AsyncClient(transport=MemoryTransport(app, tasks), base_url="http://here:1") as http:
        yield Site(http, gateway, service, environment, finished)


async def opened(at: Site, **body: Any) -> dict[str, str]:
    return (await at.post("/sessions", body)).json()


async def chat(at: Site, handle: dict[str, str]) -> httpx2.Response:
    return await at.http.post(f"{handle['base_url']}/chat/completions", json=CHAT)


def test_the_record_says_the_shares_of_its_tokens_and_the_fields_that_masked_them() -> None:
    async def main() -> None:
        async with site() as at:
            handle = await opened(at, sampling={"max_tokens": 5})
            trained = (await chat(at, handle)).json()["usage"]["completion_tokens"]
            cold = await at.http.post(f"{handle['base_url']}/chat/completions", json={**CHAT, "temperature": 0.5})
            assert cold.headers["x-midflight-masked"] == "not_policy_sampled; field=temperature"
            masked = cold.json()["usage"]["completion_tokens"]
            record = (await at.post(f"/sessions/{handle['session_id']}/end", token=handle["owner_token"])).json()
            assert record["masked_by"] == {"temperature": masked} and record["replaced"] == {}
            total = trained + masked
            assert record["shares"] == {"trained": trained / total, "not_policy_sampled": masked / total}

    run_virtual(main)


def test_a_harness_opens_a_session_scores_it_and_reads_its_rows() -> None:
    async def main() -> None:
        async with site() as at:
            handle = await opened(at, sampling={"max_tokens": 5}, task={"number": [1, None]})
            assert handle["base_url"] == f"http://here:1/s/{handle['api_key']}/v1"
            elsewhere = await at.http.post(f"{API}/sessions", headers={**CONTROL, "host": "evil.example"}, json={})
            assert elsewhere.json()["base_url"].startswith("http://here:1/s/"), "whatever the client calls this place"
            answer = (await chat(at, handle)).json()
            owner, place = handle["owner_token"], f"/sessions/{handle['session_id']}"
            assert (await at.post(f"{place}/reward", {"reward": 0.5}, token=owner)).status_code == 200
            record = (await at.post(f"{place}/end", token=owner)).json()
            assert (record["reward"], record["task"], record["num_turns"]) == (0.5, {"number": [1, None]}, 1)
            (row,) = record["rows"]
            assert sum(row["loss_mask"]) == answer["usage"]["completion_tokens"] == record["num_tokens"] <= 5
            assert {len(values) for values in row.values()} == {answer["usage"]["total_tokens"]}
            again = (await at.post(f"{place}/end", token=owner)).json()
            assert (again["rows"], again["rows_given"], again["reward"]) == ([], True, 0.5)
            assert (await chat(at, handle)).status_code == 410

    run_virtual(main)


def test_an_ended_session_comes_packed_when_it_has_a_reward_and_stays_whole_when_it_has_none() -> None:
    async def main() -> None:
        async with site() as at:
            handle = await opened(at)
            await chat(at, handle)
            place = f"/sessions/{handle['session_id']}"
            early = await at.post(f"{place}/end", accept="application/octet-stream")
            assert early.status_code == 400 and "post that first" in early.json()["error"]["message"]
            assert (await chat(at, handle)).status_code == 200, "it has not ended"
            await at.post(f"{place}/reward", {"reward": -1})
            packed = from_bytes((await at.post(f"{place}/end", accept="application/octet-stream")).content)
            assert (packed.rewards.tolist(), packed.lease, packed.train_version) == ([-1.0], 0, 5)
            assert packed.loss_mask.sum() > 0

    run_virtual(main)


def test_an_agent_can_neither_score_nor_read_nor_end_a_session_and_an_owner_only_his_own() -> None:
    async def main() -> None:
        async with site() as at:
            mine, other = await opened(at), await opened(at)
            for verb, body in (("reward", {"reward": 1}), ("end", {})):
                place = f"/sessions/{mine['session_id']}/{verb}"
                for token in (mine["api_key"], other["api_key"], other["owner_token"], mine["session_id"], "", TOKEN + "x"):
                    answer = await at.post(place, body, token=token)
                    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
                headers = {"x-midflight-session": mine["owner_token"]}
                assert (await at.http.post(API + place, json=body, headers=headers)).status_code == 401
                assert (await at.post(place, body, token=mine["owner_token"])).status_code == 200
            assert (await at.post(f"/sessions/{mine['session_id']}/reward", {"reward": 2})).status_code == 409
            assert (await at.post("/sessions/mf-none/end")).status_code == 404
            chatting = await at.http.post(f"/s/{other['owner_token']}/v1/chat/completions", json=CHAT)
            assert chatting.status_code == 401, "the owner's token is no agent's"

    run_virtual(main)


CONTROLLED = [
    *(("POST", f"{API}/{path}") for path in ("sessions", "claims", "take", "done", "weights", "checkpointed", "finish", "tasks")),
    ("GET", API),
    *(("POST", f"{API}/sessions/mf-x/{verb}") for verb in ("reward", "end")),
    *(("POST", path) for path in ("/pause_generation", "/continue_generation", "/abort_request")),
]


def test_every_control_route_is_401_without_its_token_or_with_another() -> None:
    async def main() -> None:
        async with site() as at:
            handle = await opened(at)
            for method, path in CONTROLLED:
                path = path.replace("mf-x", handle["session_id"])
                for headers in (
                    {},
                    {"authorization": "Bearer wrong"},
                    {"authorization": f"Bearer {handle['api_key']}"},
                    {"x-api-key": TOKEN},
                ):
                    answer = await at.http.request(method, path, headers=headers, content=b"{}")
                    assert answer.status_code == 401, (path, headers)
            assert (await at.http.get("/health")).status_code == 200
            assert not at.service.said

    run_virtual(main)


def test_posted_tasks_are_numbered_and_counted() -> None:
    async def main() -> None:
        async with site() as at:
            answer = await at.post("/tasks", {"tasks": [{"question": "a"}, {"question": "b", "n": [1, None]}]})
            assert (answer.status_code, answer.json()) == (200, {"first": 4, "taken": 2, "waiting": 7})
            assert at.service.said == [("tasks", {"question": "a"}, {"question": "b", "n": [1, None]})]

    run_virtual(main)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/sessions", {"samplng": {}}, "samplng"),
        ("/sessions", {"sampling": {"temperature": -1}}, "temperature"),
        ("/sessions", {"sampling": {"stop": [""]}}, "stop"),
        ("/sessions", {"sampling": {"stop": ["x"] * 17}}, "stop"),
        ("/sessions", {"sampling": {"top_k": 2**65}}, "top_k"),
        ("/sessions", {"sampling": {"top_k": 2**31}}, "top_k"),
        ("/sessions", {"sampling": {"max_tokens": 2**65}}, "max_tokens"),
        ("/sessions", {"sampling": {"min_tokens": 2**65}}, "min_tokens"),
        ("/sessions", {"sampling": {"temperature": 1001}}, "temperature"),
        ("/sessions", {"task": "x" * 70_000}, "task has"),
        ("/sessions", {"task": "DEEP"}, ""),
        ("/claims", {"max": 0}, "max"),
        ("/claims", {"wait_seconds": 1e9}, "wait_seconds"),
        ("/tasks", {"tasks": []}, "tasks"),
        ("/tasks", {"tasks": ["a"]}, "Expected `object`, got `str` - at `$.tasks[0]`"),
        ("/take", {}, "train_version"),
        ("/take", {"train_version": -1}, "train_version"),
        ("/take", {"train_version": 2**65}, "train_version"),
        ("/done", {"lease": 1, "version": "2"}, "version"),
        ("/weights", {"version": 0}, "`version` and `file`"),
        ("/weights", {"version": 0, "transport": "file", "location": "/etc/passwd"}, "all fields"),
    ],
)
def test_a_wrong_body_is_refused_with_what_is_wrong_in_it(path: str, body: Any, words: str) -> None:
    async def main() -> None:
        async with site() as at:
            content = json.dumps(body).encode().replace(b'"DEEP"', b"[" * 20_000 + b"]" * 20_000)
            answer = await at.http.post(API + path, content=content, headers=CONTROL)
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_request"
            assert words in answer.json()["error"]["message"]
            for garbage in (b"{", b"[]", b"\xff", b"[" * 5000):
                raw = await at.http.post(API + path, content=garbage, headers=CONTROL)
                assert raw.status_code == 400, garbage

    run_virtual(main)


SAID = {
    "reward": 0.5,
    "components": {"right": 1.0, "short": None},
    "metrics": {"letters": 7},
    "turns": [0.25],
    "fields": {"said": "hello"},
    "roles": {"critic": 2.0},
}


def test_a_reward_comes_with_what_it_is_made_of_and_with_those_of_roles() -> None:
    """As an environment's `Result` does: a component that is null does not apply."""

    async def main() -> None:
        async with site() as at:
            handle = await opened(at)
            critic = {**handle, "base_url": handle["base_url"].replace(handle["api_key"], handle["api_key"] + "~critic")}
            lengths = [(await chat(at, each)).json()["usage"]["completion_tokens"] for each in (handle, critic)]
            place = f"/sessions/{handle['session_id']}"
            assert (await at.post(f"{place}/reward", SAID)).json()["reward"] == 0.5
            assert (await at.post(f"{place}/reward", SAID)).status_code == 200
            assert (await at.post(f"{place}/reward", {**SAID, "roles": {"critic": 1}})).status_code == 409
            record = (await at.post(f"{place}/end")).json()
            said = {name: record[name] for name in SAID}
            assert said == {**SAID, "components": {"right": 1.0}}
            assert [(row.get("role", ""), sum(row["loss_mask"])) for row in record["rows"]] == [("", lengths[0]), ("critic", lengths[1])]

    run_virtual(main)


def test_a_packed_session_has_a_rollout_for_each_role_that_has_a_reward() -> None:
    async def main() -> None:
        async with site() as at:
            for roles, rewards in (({"critic": 2.0}, [0.5, 2.0]), ({}, [0.5])):
                handle = await opened(at)
                critic = {**handle, "base_url": handle["base_url"].replace(handle["api_key"], handle["api_key"] + "~critic")}
                for each in (handle, critic):
                    await chat(at, each)
                place = f"/sessions/{handle['session_id']}"
                await at.post(f"{place}/reward", {"reward": 0.5, "roles": roles})
                packed = from_bytes((await at.post(f"{place}/end", accept="application/octet-stream")).content)
                assert packed.rewards.tolist() == rewards and packed.rollout_group.tolist() == list(range(len(rewards)))

    run_virtual(main)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"components": {"right": 1e39}}, "component 'right' was 1e"),
        ({"metrics": {"letters": 1e39}}, "metric 'letters' was 1e"),
        ({"roles": {"critic": 1e39}}, "reward of role 'critic' was 1e"),
        ({"turns": [1, 1e39]}, "reward of turn 1 was 1e"),
        ({"roles": {"critic": "good"}}, "roles"),
        ({"component": {}}, "component"),
    ],
)
def test_i10_what_comes_beside_a_reward_is_checked_as_it_is(wrong: dict[str, Any], named: str) -> None:
    async def main() -> None:
        async with site() as at:
            place = f"/sessions/{(await opened(at))['session_id']}/reward"
            answer = await at.post(place, {"reward": 1, **wrong})
            assert answer.status_code == 400 and named in answer.text
            assert (await at.post(place, {"reward": 0})).status_code == 200, "it was not taken"

    run_virtual(main)


@pytest.mark.parametrize("reward", ["1e39", "1e400", "1" + "0" * 400, "NaN", "true", '"1"', "[]"])
def test_i10_a_reward_is_a_finite_number_or_null_and_never_left_out(reward: str) -> None:
    async def main() -> None:
        async with site() as at:
            place = f"{API}/sessions/{(await opened(at))['session_id']}/reward"
            for body in (f'{{"reward": {reward}}}', "{}", ""):
                assert (await at.http.post(place, content=body, headers=CONTROL)).status_code == 400
            assert (await at.http.post(place, content='{"reward": null}', headers=CONTROL)).json()["reward"] is None

    run_virtual(main)


def test_beyond_the_most_sessions_the_answer_is_429_with_retry_after() -> None:
    async def main() -> None:
        async with site(max_sessions=1) as at:
            handle = await opened(at)
            refused = await at.post("/sessions")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            await at.post(f"/sessions/{handle['session_id']}/end")
            assert (await at.post("/sessions")).status_code == 200

    run_virtual(main)


def test_a_worker_claims_a_rollout_runs_its_agent_and_scores_it() -> None:
    async def main() -> None:
        async with site() as at:
            waiting = asyncio.get_running_loop().create_task(at.post("/claims", {"max": 4, "wait_seconds": 50}))
            await asyncio.sleep(1)
            session = at.gateway.open(RolloutKey(GroupKey(0, 0), 0), sampling=SamplingParams(max_tokens=4), tracked=True)

            class Client:
                api_key = session.api_key

            running = asyncio.get_running_loop().create_task(at.environment(Task("t1", "words", {"question": "q"}), Client()))  # type: ignore[arg-type]
            (claim,) = (await waiting).json()
            assert claim["task"] == {"id": "t1", "source": "words", "data": {"question": "q"}}
            assert (claim["session_id"], claim["api_key"]) == (session.session_id, session.api_key)
            assert (await chat(at, claim)).status_code == 200
            place = f"/sessions/{claim['session_id']}/reward"
            assert (await at.post(place, {"reward": 1}, token=claim["api_key"])).status_code == 401
            assert (await at.post(place, {"reward": 0.75}, token=claim["owner_token"])).status_code == 200
            assert await running == Result(0.75)
            assert (await at.post(place, {"reward": 0.75}, token=claim["owner_token"])).status_code == 200
            assert (await at.post(place, {"reward": 1}, token=claim["owner_token"])).status_code == 409
            assert (await at.post("/claims", {"wait_seconds": 5})).json() == []

    run_virtual(main)


def test_a_trainer_takes_packed_or_lists_reports_publishes_and_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    async def main() -> None:
        async with site(model=tmp_path) as at:
            info = (await at.http.get(API, headers=CONTROL)).json()
            assert (info["api_version"], info["served_version"], info["model_path"]) == (1, 1, "/model")
            packed = from_bytes((await at.post("/take", {"train_version": 0})).content)
            lists = (await at.post("/take", {"train_version": 0}, accept="text/html, application/json;q=0.9")).json()
            assert lists == {
                "lease": 3,
                "train_version": 0,
                "rollouts": [
                    {"group": 0, "reward": 1.0, "truncated": False, "room": 6},
                    {"group": 1, "reward": 0.25, "truncated": True, "room": None},
                ],
                "rows": [
                    {"token_ids": [1, 2, 3], "loss_mask": [False, True, True], "logprobs": [0.0, -0.5, -1.5], "versions": [0, 0, 0],
                     "kv_versions": [0, 0, 0], "rollout": 0}
                ],
            }  # fmt: skip
            assert packed.token_ids.tolist() == lists["rows"][0]["token_ids"]
            assert (await at.post("/done", {"lease": 3, "version": 5})).json()["error"]["code"] == "out_of_turn"
            said = {"lease": 3, "version": 1, "metrics": {"loss": 0.5, "not finite": None}}
            assert (await at.post("/done", said)).json() == {"version": 1}
            (step,) = at.service.said
            assert isinstance(step, Stepped) and step.num_tokens == 2
            assert step.metrics["loss"] == 0.5 and math.isnan(step.metrics["not finite"]), "JSON has null for it"
            assert (await at.post("/done", said)).json() == {"version": 1}
            assert (await at.post("/done", {"lease": 3, "version": 1})).status_code == 409
            manifest = {"version": 1, "fingerprint": "f", "transport": "file", "location": str(tmp_path / "config.json"), "tensors": []}
            assert (await at.post("/weights", manifest)).json() == {"version": 1, "served_version": 1}
            assert (await at.post("/weights", {**manifest, "version": 0})).status_code == 409
            assert (await at.post("/weights", {"version": 1, "file": "/nowhere"})).status_code == 400
            assert (await at.post("/checkpointed", {"version": 1})).status_code == 200
            assert not at.finished.is_set()
            assert (await at.post("/finish", {"version": 1})).status_code == 200
            await asyncio.sleep(0)
            assert at.finished.is_set()

    run_virtual(main)


def test_a_trainer_gives_a_batch_back_skips_a_step_and_goes_back_to_its_checkpoint() -> None:
    async def main() -> None:
        async with site() as at:
            assert (await at.post("/take_back", {"lease": 3})).json()["error"]["code"] == "unknown_lease"
            await at.post("/take", {"train_version": 0})
            assert (await at.post("/take_back", {"lease": 3})).json() == {"lease": 3}
            assert (await at.post("/done", {"lease": 3, "version": 1})).status_code == 409
            await at.post("/take", {"train_version": 0})
            assert (await at.post("/done", {"lease": 3, "version": 1, "skipped": True})).json() == {"version": 1}
            step = at.service.said[-1]
            assert isinstance(step, Stepped) and (step.skipped, step.num_tokens) == (True, 0)
            await at.post("/checkpointed", {"version": 1})
            for beyond in (0, 2):
                assert (await at.post("/restart", {"version": beyond})).json()["error"]["code"] == "out_of_turn"
            assert (await at.post("/restart", {"version": 1})).json() == {"version": 9}
            assert at.service.said[-1] == ("restart", 1)
            assert (await at.post("/take", {"train_version": 9})).status_code == 200
            assert (await at.post("/done", {"lease": 3, "version": 10})).json() == {"version": 10}
            await at.post("/restart", {"version": 1}, **{"x-midflight-life": "1"})
            late = await at.post("/take", {"train_version": 9}, **{"x-midflight-life": "0"})
            assert late.status_code == 409 and "trainer 0 of this run was given up" in late.json()["error"]["message"]
            assert (await at.post("/take", {"train_version": 9}, **{"x-midflight-life": "1"})).status_code == 200

    run_virtual(main)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"location": "/nowhere"}, "No such file"),
        ({"location": "/"}, "it is no file"),
        ({"transport": "pigeon"}, "pigeon"),
        ({"tensors": [{"name": "w", "dtype": "F32", "shape": [2], "offset": 0, "num_bytes": 8}]}, "it has 6 bytes of 8"),
        ({"tensors": [{"name": "w", "dtype": "F32", "shape": [2], "offset": 0, "num_bytes": 4}]}, "'w'"),
    ],
)
def test_a_manifest_that_no_engine_could_read_is_refused_and_its_number_stays_free(
    tmp_path: Path, wrong: dict[str, Any], words: str
) -> None:
    (tmp_path / "weights").write_bytes(b"123456")

    async def main() -> None:
        async with site() as at:
            await at.post("/take", {"train_version": 0})
            await at.post("/done", {"lease": 3, "version": 1})
            right = {"version": 1, "fingerprint": "f", "transport": "file", "location": str(tmp_path / "weights"), "tensors": []}
            refused = await at.post("/weights", {**right, "fingerprint": "other", **wrong})
            assert refused.status_code == 400 and words in refused.json()["error"]["message"]
            assert (await at.post("/weights", right)).status_code == 200
            assert [m.fingerprint for m in at.service.said if isinstance(m, WeightManifest)] == ["f"]

    run_virtual(main)


def test_a_token_sent_in_the_place_of_an_id_is_not_told_back() -> None:
    async def main() -> None:
        seen = Facts()
        shown: list[str] = []
        async with site(record=seen.apply) as at:
            handle = await opened(at)
            for misplaced in (handle["owner_token"], TOKEN):
                shown.append((await at.post(f"/sessions/{misplaced}/end", token=handle["owner_token"])).text)
                shown.append((await at.http.post(f"/s/{misplaced}/v1/chat/completions", json=CHAT)).text)
        assert all("error" in answer for answer in shown)
        text = "".join([*shown, repr(seen)])
        assert TOKEN not in text and handle["owner_token"].partition(".")[2] not in text

    run_virtual(main())


def test_a_sessions_temperature_is_one_that_requests_may_have() -> None:
    async def main() -> None:
        async with site() as at:
            refused = await at.post("/sessions", {"sampling": {"temperature": 1e-30}})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "sampling.temperature")
            for temperature in (0, 1e-4, 1):
                assert (await at.post("/sessions", {"sampling": {"temperature": temperature}})).status_code == 200

    run_virtual(main())


@pytest.mark.parametrize("version", [1, 2**63, 2**80])
def test_i8_a_checkpoint_of_a_version_that_was_never_made_is_refused_and_reaches_no_store(version: int) -> None:
    async def main() -> None:
        async with site() as at:
            answer = await at.post("/checkpointed", {"version": version})
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "out_of_turn")
            assert (await at.post("/checkpointed", {"version": 0})).status_code == 200
            assert at.service.said == [("checkpointed", 0)]

    run_virtual(main())


@pytest.mark.parametrize(
    "said",
    [{"num_tokens": -5}, {"num_tokens": 2**60}, {"started": -1.0}, {"ended": 1e300}, {"metrics": {str(k): 0.0 for k in range(1025)}}],
)
def test_a_step_that_cannot_have_been_is_refused_and_its_lease_stays_open(said: dict[str, Any]) -> None:
    async def main() -> None:
        async with site() as at:
            await at.post("/take", {"train_version": 0})
            assert (await at.post("/done", {"lease": 3, "version": 1, **said})).status_code == 400
            assert not at.service.said
            assert (await at.post("/done", {"lease": 3, "version": 1})).status_code == 200

    run_virtual(main())


def test_a_take_that_may_wait_so_long_and_no_longer_answers_204() -> None:
    async def main() -> None:
        async with site(service=Service(seconds=25)) as at:
            began = asyncio.get_running_loop().time()
            answer = await at.post("/take", {"train_version": 0, "wait_seconds": 10})
            assert (answer.status_code, answer.content) == (204, b"")
            assert asyncio.get_running_loop().time() - began == pytest.approx(10)
            assert (await at.post("/take", {"train_version": 0, "wait_seconds": 30})).status_code == 200
            assert (await at.post("/take", {"train_version": 0})).status_code == 200

    run_virtual(main)


def test_what_is_gone_is_refused_by_name_with_its_replacement() -> None:
    async def main() -> None:
        async with site(service=Service()) as at:
            answer = await at.post("/ahead", {"version": 0, "tokens": 9})
            assert answer.status_code == 400 and "Use POST take" in answer.json()["error"]["message"]
            assert at.service.said == []

    run_virtual(main)


def test_no_secret_is_in_any_log_error_or_fact(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        seen = Facts()
        shown: list[str] = []
        async with site(record=seen.apply) as at:
            handle = await opened(at)
            await chat(at, handle)
            for wrong in (handle["api_key"], handle["owner_token"] + "x", handle["owner_token"][:-1]):
                shown.append((await at.post(f"/sessions/{handle['session_id']}/reward", {"reward": 1}, token=wrong)).text)
            bad = {**handle, "base_url": handle["base_url"].replace("/v1", "x/v1")}
            shown.append((await chat(at, bad)).text)
            shown.append((await at.post(f"/sessions/{handle['session_id']}/end", token=handle["owner_token"])).text)
            shown += [(await chat(at, handle)).text, repr(at.gateway.registry), repr(seen)]
        secrets = [handle[name].partition(".")[2] for name in ("api_key", "owner_token")] + [TOKEN]
        everything = "\n".join([*shown, caplog.text])
        assert handle["session_id"] in everything and seen
        assert not [secret for secret in secrets if secret in everything]

    hide_secrets()  # as in every process that runs agents
    with caplog.at_level(logging.DEBUG):
        run_virtual(main)
    assert "/v1/chat/completions" in caplog.text, "the client's library has logged"
