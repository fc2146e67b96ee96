"""Judges and simulated users: what they say is no part of any record, and without them nothing is scored."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from midflight import Client
from midflight.config.agents import UntrackedSection
from midflight.config.checks import contradictions
from midflight.config.sections import Config, EngineSection
from midflight.environments.agent_program import Environment
from midflight.environments.agents import LocalAgents, SharedClients
from midflight.environments.clients import PlainClient
from midflight.errors import ConfigError, UntrackedUnavailable
from midflight.gateway.sessions.request import CompletionCall, Messages
from midflight.testing.script import Script
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import GroupKey, PauseMode, RolloutKey, Task, Trajectory
from midflight.types.facts import Admitted, GroupFinished, RolloutEnded

from .site import TOKENIZER, Site, config
from .test_going_back import Foreign


def engines() -> list[ScriptedEngine]:
    """Two, whose answers end by their limits only."""
    return [ScriptedEngine(f"e{i}", script=Script(mean_length=100_000), tokenizer=TOKENIZER) for i in range(2)]


def with_engines(made: Config, number: int) -> Config:
    environment = made.environment.model_copy(update={"untracked": UntrackedSection(engines=number)})
    return made.model_copy(update={"engine": EngineSection(count=2), "environment": environment})


async def said(client: Client, length: int, *, question: str) -> str:
    """An answer of exactly so many tokens."""
    answer = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": question}], max_tokens=length)
    assert answer.usage is not None and answer.usage.completion_tokens == length
    return answer.choices[0].message.content or ""


async def judged(task: Task, client: Client) -> float:
    """Three tokens of the policy, five of a judge."""
    assert isinstance(client, openai.AsyncOpenAI)
    answer = await said(client, 3, question=str(task.data["question"]))
    verdict = await said(client.untracked(), 5, question=f"How good is {answer!r}?")
    return 0.5 + len(verdict) / 100


def trajectories(site: Site) -> list[Trajectory]:
    return [t for batch in site.taken for group in batch.groups for t in group.trajectories]


def test_i3_a_judges_tokens_are_not_recorded_and_not_trained(tmp_path: Path) -> None:
    async def main() -> Site:
        site = Site(with_engines(config(steps=3), 1), tmp_path, engines=engines(), agents=judged)
        await site.run()
        return site

    site = run_virtual(main)
    site.check_groups()
    site.check_ages()
    site.check_fates()
    assert [t.num_trainable for t in trajectories(site)] == [3] * 12
    assert set(site.received.values()) == {3}, "the gateway counts the policy's tokens alone"
    assert {len(turns) for turns in site.turns.values()} == {1}


def test_a_judge_is_not_late_by_its_engine_and_one_that_sleeps_is_ended(tmp_path: Path) -> None:
    """A token of the judge's engine takes 10 s, five of them longer than `rollout_seconds`, which is 20."""
    slept = Counter[str]()

    async def sleeps_once(task: Task, client: Client) -> float:
        slept[task.id] += 1
        if slept.total() == 1:
            await asyncio.sleep(1000)
        return await judged(task, client)

    async def main() -> Site:
        both = engines()
        both[1].step_seconds = 10.0
        site = Site(with_engines(config(steps=3), 1), tmp_path, engines=both, agents=sleeps_once)
        await site.run()
        return site

    site = run_virtual(main)
    site.check_groups()
    lost = [ended.error for ended in site.seen.of(RolloutEnded) if ended.error]
    assert len(lost) == 1 and "its agent took 20 s by itself, and environment.rollout_seconds is 20" in lost[0]


def test_engines_apart_keep_their_version_and_answer_nothing_else(tmp_path: Path) -> None:
    seen: dict[str, set[int]] = {}

    async def main() -> Site:
        both = engines()
        for engine in both:
            of_engine, generate = seen.setdefault(engine.name, set()), engine.generate

            async def watched(request: Any, of_engine: set[int] = of_engine, generate: Any = generate) -> Any:
                of_engine.add(request.sampling.max_tokens)
                async for chunk in generate(request):
                    yield chunk

            engine.generate = watched  # type: ignore[method-assign]
        site = Site(with_engines(config(steps=4), 1), tmp_path, engines=both, agents=judged)
        await site.run()
        return site

    site = run_virtual(main)
    assert seen == {"e0": {3}, "e1": {5}}
    assert site.ring is not None
    policy, apart = site.ring.serving.states()
    assert (policy.name, apart.name, apart.version) == ("e0", "e1", 0) and policy.version >= 3
    assert site.ring.serving.fleet.served_version() == policy.version, "what stays behind holds no admission up"


def test_an_engine_apart_that_is_started_again_after_the_trainer_went_back_answers_again_as_it_did(tmp_path: Path) -> None:
    async def main() -> None:
        site = Site(with_engines(config(), 1), tmp_path, engines=engines(), agents=judged)
        async with site.opened() as ring:
            foreign = Foreign(site, ring.system)

            async def train() -> None:
                for version in range(2):
                    await foreign.step(await foreign.take(version))
                    if version == 0:
                        await foreign.save()
                await foreign.go_back(1)
                site.engines[1].die()
                await asyncio.sleep(3)
                assert [state.error is None for state in ring.serving.states()] == [True, False]
                site.engines[1].revive()
                for _ in range(2):
                    await foreign.step(await foreign.take(foreign.version))
                policy, apart = ring.serving.states()
                assert (apart.name, apart.version, apart.error) == ("e1", 0, None) and policy.version == foreign.version > 2

            await ring.serve(train())

    run_virtual(main, max_seconds=3600)


def test_an_operators_pause_holds_what_is_asked_of_engines_apart_and_no_deadline_counts_it(tmp_path: Path) -> None:
    """A pause of 300 s, within a request that may take 60 s and a rollout that may take 20 s."""

    async def main() -> None:
        site = Site(with_engines(config(steps=1), 1), tmp_path, engines=engines(), agents=judged)
        async with site.opened() as ring:
            control = ring.serving.control

            async def pause() -> None:
                while not site.engines[1].requests:
                    await asyncio.sleep(0.01)
                await control.pause()
                assert [engine.paused for engine in site.engines] == [PauseMode.KEEP] * 2
                made = [(await engine.health()).num_tokens for engine in site.engines]
                await asyncio.sleep(300)
                assert [(await engine.health()).num_tokens for engine in site.engines] == made
                await control.resume()
                assert [(state.held_by, state.paused_by) for state in ring.serving.states()] == [((), ())] * 2

            await ring.train(site.trainer, site.trainer, pause())
        assert [t.num_trainable for t in trajectories(site)] == [3] * 4 and not any(t.error for t in trajectories(site))

    run_virtual(main, max_seconds=3600)


def test_i10_while_the_last_engine_apart_is_gone_for_good_rollouts_fail_at_once_by_its_name(tmp_path: Path) -> None:
    """It is lost in the midst of an answer. Twice the SDK tries again, which takes seconds; a request may take 60 s, a rollout 20 s."""

    async def main() -> None:
        site = Site(with_engines(config(steps=2), 1), tmp_path, engines=engines(), agents=judged)
        async with site.opened() as ring:
            serving, loop = ring.serving, asyncio.get_running_loop()

            async def lose() -> None:
                while not site.engines[1].requests:
                    await asyncio.sleep(0.01)
                site.engines[1].die()
                await asyncio.sleep(1)
                began = loop.time()
                serving.apart.detach("e1")
                serving.give_up("e1")
                while not (failed := [end for end in site.seen.of(RolloutEnded) if end.error]):
                    await asyncio.sleep(0.1)
                assert loop.time() - began < 10
                assert re.search(
                    r"UntrackedUnavailable.*e1, the last engine that answers what is not trained, has left", str(failed[0].error)
                )
                assert failed[0].reward is None
                site.engines[1].revive()
                serving.apart.attach(site.engines[1], version=0)
                serving.beside.forsaken = ""

            await ring.train(site.trainer, site.trainer, lose())
        assert {t.num_trainable for t in trajectories(site) if t.reward is not None} == {3}

    run_virtual(main, max_seconds=3600)


def test_without_engines_apart_what_is_not_trained_is_refused_with_the_remedy(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(config(), tmp_path, agents=judged).opened() as ring:
            ring.serving.gateway.on_turn = None
            clients = SharedClients()
            handle = ring.serving.gateway.open(RolloutKey(GroupKey(0, 0), 0), sampling=ring.config.environment.sampling, tracked=True)
            with pytest.raises(ConfigError, match=r"environment\.untracked\.url .* environment\.untracked\.engines"):
                clients.client_for(handle).untracked()
            with pytest.raises(Exception, match=r"no engine is reserved.*environment\.untracked\.engines"):
                part = ring.serving.gateway.session_for(path_token=None, api_key=f"{handle.api_key}~untracked")
                ring.serving.gateway.prepare(part, _chat())
            await clients.close()

    run_virtual(main)


def _chat() -> Any:
    return CompletionCall((Messages(({"role": "user", "content": "hi"},)),))


# --- Outside the run --------------------------------------------------------------------------------------------------


class Outside:
    """A server of the OpenAI API; `status` above 200 is an error, 0 is nobody there."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.asked: list[httpx2.Request] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(request)
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if not status:
            raise httpx2.ConnectError("nobody there")
        if status != 200:
            return httpx2.Response(status, json={"error": {"message": "no"}})
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "good"}}
        return httpx2.Response(200, json={"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]})


async def run_one(environment: Environment, outside: Outside, monkeypatch: pytest.MonkeyPatch) -> object:
    """What becomes of one agent, whose judge is outside."""
    monkeypatch.setenv("JUDGE_KEY", "a-key")
    section = UntrackedSection(url="http://judge.invalid/v1", api_key_env="JUDGE_KEY")
    monkeypatch.setattr(openai, "DefaultAsyncHttpxClient", lambda **_: httpx2.AsyncClient(transport=httpx2.MockTransport(outside)))
    monkeypatch.setattr(openai, "DefaultHttpxClient", lambda **_: httpx2.Client(transport=httpx2.MockTransport(outside)))
    async with SharedClients(untracked=section) as clients:
        host = LocalAgents(environment, client_for=clients.client_for, plain_client_for=clients.plain_client_for)
        return await host.run(Task("t", "s"), _Handle())


class _Handle:
    session_id, base_url, api_key = "mf-1", "http://gateway.invalid/s/mf-1.secret/v1", "mf-1.secret"


def ask_judge(client: Any) -> Any:
    judge = client.untracked().with_options(max_retries=0)
    return judge.chat.completions.create(model="judge", messages=[{"role": "user", "content": "good?"}])


async def asks(task: Task, client: Client) -> float:
    return float((await ask_judge(client)).choices[0].message.content == "good")


def asks_plainly(task: Task, client: PlainClient) -> float:
    return float(ask_judge(client).choices[0].message.content == "good")


async def swallows(task: Task, client: Client) -> float:
    """Counts a judge that does not answer as one that says no."""
    try:
        return await asks(task, client)
    except Exception:
        return 0.0


async def tries_again(task: Task, client: Client) -> float:
    await swallows(task, client)
    return await asks(task, client)


@pytest.mark.parametrize("environment", [asks, asks_plainly])
def test_a_judge_outside_is_asked_at_its_own_address_with_its_own_key(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        outside = Outside(200)
        assert await run_one(environment, outside, monkeypatch) == 1.0
        (request,) = outside.asked
        assert str(request.url) == "http://judge.invalid/v1/chat/completions"
        assert request.headers["authorization"] == "Bearer a-key" and "secret" not in str(request.headers)

    asyncio.run(main())


@pytest.mark.parametrize("environment", [asks, asks_plainly, swallows])
@pytest.mark.parametrize("status", [0, 401, 404, 429, 500])
def test_i10_a_judge_that_is_down_fails_the_rollout_also_where_the_agent_goes_on(
    environment: Environment, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        with pytest.raises(UntrackedUnavailable, match=r"http://judge\.invalid/v1/ by client\.untracked\(\): .*see that it runs"):
            await run_one(environment, Outside(status), monkeypatch)

    asyncio.run(main())


def test_a_judge_that_answers_in_the_end_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        assert await run_one(tries_again, Outside(500, 200), monkeypatch) == 1.0
        assert await run_one(swallows, Outside(400), monkeypatch) == 0.0, "what blames the request is the agent's to deal with"

    asyncio.run(main())


def test_a_key_that_is_not_there_ends_the_run_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with SharedClients(untracked=UntrackedSection(url="http://judge.invalid/v1", api_key_env="NO_SUCH_KEY")) as clients:
            with pytest.raises(ConfigError, match=r"api_key_env names NO_SUCH_KEY"):
                clients.client_for(_Handle()).untracked()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("untracked", "said"),
    [
        ({"url": "http://j/v1", "engines": 1}, "a url and engines"),
        ({"engines": 2}, r"leaves none of 2 engines"),
        ({"url": "judge:8000"}, "must be an address"),
        ({"api_key_env": "KEY"}, "and there is none"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_a_run(untracked: dict[str, Any], said: str) -> None:
    made = config()
    environment = made.environment.model_copy(update={"untracked": UntrackedSection(**untracked)})
    found = "\n".join(contradictions(made.model_copy(update={"engine": EngineSection(count=2), "environment": environment})))
    assert re.search(said, found), found


def test_groups_of_judged_rollouts_count_as_any_others(tmp_path: Path) -> None:
    async def main() -> Site:
        site = Site(with_engines(config(steps=2), 1), tmp_path, engines=engines(), agents=judged)
        await site.run()
        return site

    site = run_virtual(main)
    assert Counter(len(group.group.trajectories) for group in site.seen.of(GroupFinished)).keys() == {2}
    assert len(site.seen.of(Admitted)) >= 4
