"""Several sessions of one rollout: each role is recorded, scored and compared by itself, and everything that it said has one fate."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midflight import Client
from midflight.archive.credit import credit_of
from midflight.archive.store_reader import reading
from midflight.environments.agent_program import Environment
from midflight.environments.clients import PlainClient
from midflight.errors import ConfigError, RequestRejected
from midflight.gateway.sessions.request import CompletionCall, Messages
from midflight.testing.script import Script
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.trainer.credit import Scoring, answer_advantages
from midflight.trajectories.packing import from_bytes, pack, to_bytes
from midflight.trajectories.store import Store
from midflight.types import Batch, Group, GroupKey, PackedBatch, Reason, Result, RolloutKey, Task, Trajectory
from midflight.types.facts import RolloutEnded, TrajectoryKept, TurnKept

from .site import TOKENIZER, Site, config


def engines() -> list[ScriptedEngine]:
    """Answers end by their limits only."""
    return [ScriptedEngine("e0", script=Script(mean_length=100_000), tokenizer=TOKENIZER)]


async def says(client: Client, length: int, text: str) -> str:
    answer = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}], max_tokens=length)
    assert answer.usage is not None and answer.usage.completion_tokens == length
    return answer.choices[0].message.content or ""


class SelfPlay:
    """Two sides, three and five tokens; a client of its own asks nothing. The sides win in turn."""

    def __init__(self) -> None:
        self.played = Counter[str]()

    async def __call__(self, task: Task, client: Client) -> Result:
        self.played[task.id] += 1
        won = float(self.played[task.id] % 2)
        move = await says(client.role("white"), 3, str(task.data["question"]))
        await says(client.role("black"), 5, move)
        return Result(0.5, roles={"white": won, "black": 1 - won})


class WithCritic:
    """The policy says three tokens, its critic two; what the critic gets is not what the policy gets."""

    def __init__(self) -> None:
        self.played = Counter[str]()

    async def __call__(self, task: Task, client: Client) -> Result:
        self.played[task.id] += 1
        won = float(self.played[task.id] % 2)
        draft = await says(client, 3, str(task.data["question"]))
        await says(client.role("critic"), 2, draft)
        return Result(won, metrics={"drafts": 1}, roles={"critic": 10 * won + 1})


def played(folder: Path, agents: Environment, *, steps: int = 2, **options: Any) -> Site:
    async def main() -> Site:
        site = Site(config(steps=steps, **options), folder, engines=engines(), agents=agents)
        await site.run()
        return site

    site = run_virtual(main)
    site.check_groups()
    site.check_ages()
    site.check_fates()
    return site


def trained(batch: PackedBatch) -> list[tuple[int, float, int]]:
    """Of each rollout its group, reward, and number of trained tokens."""
    lengths = np.diff(batch.row_offsets)
    numbers = Counter[int]()
    for row, rollout in enumerate(batch.row_rollout.tolist()):
        begin = int(batch.row_offsets[row])
        numbers[rollout] += int(batch.loss_mask[begin : begin + int(lengths[row])].sum())
    return [(int(g), float(r), numbers[m]) for m, (g, r) in enumerate(zip(batch.rollout_group, batch.rewards, strict=True))]


def test_self_play_trains_both_sides_each_with_its_own_reward(tmp_path: Path) -> None:
    site = played(tmp_path, SelfPlay())
    for batch in site.trainer.batches:
        found = trained(batch)
        assert len(found) == 8, "two groups of two rollouts, with two sides each"
        for group, tokens in enumerate((5, 3, 5, 3)):  # roles in the order of their names
            of = [(reward, number) for at, reward, number in found if at == group]
            assert sorted(of) == [(0.0, tokens), (1.0, tokens)]
        same = from_bytes(to_bytes(batch))
        assert (same.rollout_group == batch.rollout_group).all()
    of_sides = {(turn.role, len(turn.output_ids)) for turns in site.turns.values() for turn in turns}
    assert of_sides == {("white", 3), ("black", 5)}


def test_i3_every_token_of_a_role_is_in_one_place_and_is_the_one_that_was_sampled(tmp_path: Path) -> None:
    site = played(tmp_path, WithCritic())
    for trajectory in (t for batch in site.taken for group in batch.groups for t in group.trajectories):
        turns = site.turns[trajectory.key]
        for role in ("", "critic"):
            ids = [i for row in trajectory.rows if row.role == role for i in row.token_ids[row.loss_mask].tolist()]
            assert ids == [i for turn in turns if turn.role == role for i in turn.output_ids]
        assert trajectory.num_trainable == 5
    ended = site.seen.of(RolloutEnded)
    assert all(end.metrics["roles/critic"] in (1.0, 11.0) and end.num_turns == 2 and end.num_tokens == 5 for end in ended)


def test_advantages_are_compared_within_a_role(tmp_path: Path) -> None:
    """Rewards 1 and 0 of the policy, 11 and 1 of the critic: with a mean of 0.5 and 6, (n - 1) deviations of 0.707 and 7.07, each gets ±0.707.

    Compared together they would be 1, 0, 11 and 1, and the policy's better answer would count as bad.
    """
    site = played(tmp_path, WithCritic())
    (batch, *_) = site.taken
    found = answer_advantages(pack(batch), Scoring())[:, 0].reshape(4, 2)
    assert np.allclose(np.abs(found), 2**-0.5, atol=1e-4) and np.allclose(found.sum(1), 0)
    with reading(tmp_path) as store:
        credit = credit_of(store, batch.groups[0].key, None, site.config)
    shown = {role: [float(of[0]) for (_, each), of in credit.answers.items() if each == role] for role in ("", "critic")}
    assert {role: sorted(np.sign(values)) for role, values in shown.items()} == {"": [-1.0, 1.0], "critic": [-1.0, 1.0]}


def test_groups_with_no_spread_in_any_role_are_dropped_and_others_are_not(tmp_path: Path) -> None:
    class Even(SelfPlay):
        """Every second task has no spread in any role, the others in the sides alone."""

        async def __call__(self, task: Task, client: Client) -> Result:
            result = await super().__call__(task, client)
            return Result(0.5, roles=dict.fromkeys(result.roles, 0.5) if int(task.id[1:]) % 2 else result.roles)

    site = played(tmp_path, Even(), drop_zero_spread=True)
    assert all(int(group.task_id[1:]) % 2 == 0 for batch in site.taken for group in batch.groups)
    assert site.books.dropped[Reason.ZERO_SPREAD] > 0


# --- Rewards that are wrong or missing --------------------------------------------------------------------------------


async def forgets(task: Task, client: Client) -> Result:
    await says(client, 3, "a")
    await says(client.role("critic"), 2, "b")
    return Result(1.0)


async def cannot_say(task: Task, client: Client) -> Result:
    await says(client, 3, "a")
    await says(client.role("critic"), 2, "b")
    return Result(1.0, roles={"critic": None})


async def says_nonsense(task: Task, client: Client) -> Result:
    await says(client, 3, "a")
    return Result(1.0, roles={"critic": "good"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("agent", "said"),
    [(forgets, r"the role 'critic' asked the model, and has no reward of its own"), (says_nonsense, r"reward of role 'critic' was 'good'")],
)
def test_i10_a_role_without_a_proper_reward_fails_the_rollout(tmp_path: Path, agent: Environment, said: str) -> None:
    async def main() -> Site:
        site = Site(config(steps=1), tmp_path, engines=engines(), agents=agent)
        with pytest.raises(BaseExceptionGroup) as raised:
            await site.run()
        assert raised.group_contains(Exception, match=said)
        return site

    site = run_virtual(main)
    site.check_fates()
    assert not site.taken


def test_what_a_role_said_that_cannot_be_scored_is_dropped_and_the_others_are_trained(tmp_path: Path) -> None:
    site = played(tmp_path, cannot_say)
    assert {number for batch in site.trainer.batches for _, _, number in trained(batch)} == {3}
    kept = site.seen.of(TrajectoryKept)
    assert all(dict(each.dropped) == {Reason.NO_REWARD: 2} for each in kept)


def test_roles_have_names_that_addresses_can_carry() -> None:
    client = Client(base_url="http://gateway.invalid/s/mf-1.secret/v1", api_key="mf-1.secret")
    critic = client.role("critic")
    assert (str(critic.base_url), critic.api_key) == ("http://gateway.invalid/s/mf-1.secret~critic/v1/", "mf-1.secret~critic")
    assert critic.role("other").api_key == "mf-1.secret~other" and isinstance(critic.with_options(timeout=1), Client)
    plain = PlainClient(base_url="http://gateway.invalid/s/mf-1.secret/v1", api_key="mf-1.secret").role("critic")
    assert str(plain.base_url) == "http://gateway.invalid/s/mf-1.secret~critic/v1/"
    with pytest.raises(ConfigError, match="a role is trained"):
        client.role("untracked")


# --- Sessions ---------------------------------------------------------------------------------------------------------


KEY = RolloutKey(GroupKey(0, 0), 0)
CHAT = CompletionCall((Messages(({"role": "user", "content": "hi"},)),))


async def ask(site: Site, token: str) -> tuple[int, ...]:
    assert site.ring is not None
    gateway = site.ring.serving.gateway
    (answer,) = await gateway.answers(gateway.prepare(gateway.session_for(path_token=token, api_key=None), CHAT))
    return answer.turn.output_ids


def test_i8_after_a_crash_each_role_is_given_its_own_turns_again(tmp_path: Path) -> None:
    """Two roles ask the same; their answers differ, because their seeds do."""

    async def main() -> None:
        site = Site(config(), tmp_path, engines=engines())
        kept: list[TurnKept] = []
        async with site.opened() as ring:
            gateway, key = ring.serving.gateway, KEY
            gateway.on_turn = kept.append
            first = gateway.open(key, sampling=ring.config.environment.sampling, tracked=True)
            names = ("", "~white", "~black")
            said = [await ask(site, first.api_key + name) for name in names]
            assert len(set(said)) == 3 and [each.number for each in kept] == [0, 1, 2]
            again = gateway.reopen(first.session_id)
            assert [await ask(site, again.api_key + name) for name in reversed(names)] == said[::-1]
            record = gateway.close(first.session_id)
            assert [(row.role, row.num_trainable) for row in record.rows] == [("", 12), ("white", 12), ("black", 12)]
            assert (
                not record.dropped and record.num_turns == 3 and record.num_answers == 1 and record.roles.keys() == {"", "white", "black"}
            )
            gateway.replay(key, [each.turn for each in kept[:3]])  # of another process, from its store
            second = gateway.open(key, sampling=ring.config.environment.sampling, tracked=True)
            assert [await ask(site, second.api_key + name) for name in reversed(names)] == said[::-1]
            gateway.close(second.session_id)

    run_virtual(main)


def test_the_end_of_a_session_ends_its_roles_and_a_name_that_is_none_opens_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        site = Site(config(), tmp_path, engines=engines())
        async with site.opened() as ring:
            gateway, key = ring.serving.gateway, KEY
            gateway.on_turn = None
            handle = gateway.open(key, sampling=ring.config.environment.sampling, tracked=True)
            running = asyncio.create_task(ask(site, handle.api_key + "~white"))
            await asyncio.sleep(0.1)
            record = gateway.close(handle.session_id)
            assert sum(record.dropped.values()) > 0 and not record.rows, "what ran is abandoned, and counted"
            with pytest.raises(Exception, match="ended"):
                await running
            other = gateway.open(key, sampling=ring.config.environment.sampling, tracked=True)
            for name in ("a b", "-", "x" * 65, "white~black"):
                with pytest.raises(RequestRejected, match="take letters"):
                    gateway.session_for(path_token=f"{other.api_key}~{name}", api_key=None)
            gateway.close(other.session_id)

    run_virtual(main)


def test_a_stored_rollout_has_its_roles(tmp_path: Path) -> None:
    site = played(tmp_path, WithCritic())
    store = Store(tmp_path / "store.sqlite", run=None)
    stored = [trajectory for trajectory, *_ in store.ended()]
    store.close()
    taken = {t.key: t for batch in site.taken for group in batch.groups for t in group.trajectories}
    for of in stored:
        if of.key in taken:
            assert of.roles == taken[of.key].roles and [row.role for row in of.rows] == ["", "critic"]
            assert of.roles["critic"].reward in (1.0, 11.0) and of.roles[""].reward == of.reward


def test_a_group_without_roles_is_packed_as_before() -> None:
    key = KEY
    one = Trajectory(key, "t", "s", 1.0, ())
    group = Group(key.group, "t", "s", (one,))
    assert group.by_role() == {"": group} and len(pack(Batch(0, 0, (group,))).rewards) == 1
