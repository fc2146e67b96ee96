"""Sessions opened from outside: their owners, their rewards, and how they end by themselves."""

from __future__ import annotations

import asyncio
import logging

import pytest
from tests.gateway.offered import DEFAULTS, ScriptedGenerator, make_gateway

from midflight.errors import Overloaded, RewardFixed, SessionClosed, Unauthorized, UnknownSession
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.owned_sessions import MAX_AT_ONCE, OwnedSessions, SessionExpiry
from midflight.gateway.sessions.registry import OpenSession
from midflight.gateway.sessions.request import CompletionCall, Messages
from midflight.run.parts import serve_while
from midflight.testing.virtual_time import run_virtual
from midflight.types import Result

CHAT = CompletionCall((Messages(({"role": "user", "content": "hi"},)),))
HOUR = 3600.0


def made(**options: object) -> tuple[Gateway, OwnedSessions]:
    gateway = make_gateway(ScriptedGenerator(), **options)
    return gateway, OwnedSessions(gateway, session_seconds=HOUR)


def opened(owned: OwnedSessions) -> OpenSession:
    return owned.open(sampling=DEFAULTS, keeps_rows=True)


async def ask(gateway: Gateway, handle: OpenSession) -> int:
    """Tokens of the answer."""
    (answer,) = await gateway.answers(gateway.prepare(gateway.session_for(path_token=None, api_key=handle.api_key), CHAT))
    return len(answer.turn.output_ids)


def test_i3_the_rows_of_a_session_are_handed_over_once_and_its_reward_may_come_before_or_after() -> None:
    async def main() -> None:
        gateway, owned = made()
        early, late = opened(owned), opened(owned)
        num_tokens = [await ask(gateway, early), await ask(gateway, late)]
        owned.score(early.session_id, Result(0.5))
        first, second = owned.end(early.session_id), owned.end(late.session_id)
        assert [sum(row.num_trainable for row in ended.record.rows) for ended in (first, second)] == num_tokens
        assert (first.reward, second.reward) == (0.5, None)
        owned.score(late.session_id, Result(0.0))
        again = owned.end(late.session_id)
        assert (again.reward, again.rows_given, again.record.rows, again.record.num_turns) == (0.0, True, (), 1)
        with pytest.raises(SessionClosed):
            await ask(gateway, late)

    run_virtual(main)


def test_a_reward_is_given_once_and_the_same_again_changes_nothing() -> None:
    async def main() -> None:
        _, owned = made()
        handle = opened(owned)
        owned.score(handle.session_id, Result(None))
        owned.score(handle.session_id, Result(None))
        with pytest.raises(RewardFixed, match="None already"):
            owned.score(handle.session_id, Result(0.0))

    run_virtual(main)


def test_only_the_owner_token_of_that_session_is_its_owners() -> None:
    async def main() -> None:
        _, owned = made()
        mine, other = opened(owned), opened(owned)
        owned.check_owner(mine.session_id, mine.owner_token)
        for wrong in (mine.api_key, other.owner_token, mine.session_id, "", "\ud800"):
            with pytest.raises(Unauthorized):
                owned.check_owner(mine.session_id, wrong)
        owned.end(mine.session_id)
        owned.check_owner(mine.session_id, mine.owner_token)
        assert mine.owner_token.partition(".")[2] not in repr(mine) + repr(owned.end(mine.session_id))

    run_virtual(main)


def test_a_session_ends_after_its_time_without_a_request_and_its_record_waits_as_long_for_the_owner() -> None:
    async def main() -> None:
        gateway, owned = made()
        async with asyncio.timeout(10 * HOUR):
            await serve_while(life(gateway, owned), SessionExpiry(owned).run())

    async def life(gateway: Gateway, owned: OwnedSessions) -> None:
        await asyncio.sleep(5.0)  # the loop waits with nothing to do, and hears of the first session
        unused, used = opened(owned), opened(owned)
        await asyncio.sleep(HOUR - 1)
        await ask(gateway, used)
        assert len(owned) == 2
        await asyncio.sleep(2)
        assert len(owned) == 1 and owned.num_ended == 1, "the unused one has ended"
        assert owned.end(unused.session_id).record.num_turns == 0
        await asyncio.sleep(HOUR - 4)
        assert len(owned) == 1, "an hour has not passed since the request"
        await asyncio.sleep(HOUR)
        assert len(owned) == 0 and used.session_id in owned and unused.session_id not in owned
        owned.score(used.session_id, Result(1.0))
        ended = owned.end(used.session_id)
        assert ended.reward == 1.0 and len(ended.record.rows) == 1
        await asyncio.sleep(HOUR)
        assert used.session_id not in owned
        with pytest.raises(UnknownSession, match="3600 s ago"):
            owned.score(used.session_id, Result(1.0))

    run_virtual(main)


def test_a_request_that_runs_keeps_its_session_however_long_it_takes() -> None:
    async def main() -> None:
        generator = ScriptedGenerator(seconds_per_token=2 * HOUR)
        gateway = make_gateway(generator)
        owned = OwnedSessions(gateway, session_seconds=HOUR)

        async def life() -> int:
            handle = opened(owned)
            num_tokens = await ask(gateway, handle)
            assert len(owned) == 1
            return num_tokens - sum(row.num_trainable for row in owned.end(handle.session_id).record.rows)

        assert await serve_while(life(), SessionExpiry(owned).run()) == 0

    run_virtual(main)


def test_ended_sessions_are_bounded_and_what_is_forgotten_unread_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        gateway = make_gateway(ScriptedGenerator(), max_sessions=2)
        owned = OwnedSessions(gateway, session_seconds=HOUR, max_ended=2)
        handles = [opened(owned), opened(owned)]
        with pytest.raises(Overloaded):
            opened(owned)
        owned.end(handles[0].session_id)
        handles.append(opened(owned))
        for handle in handles[1:]:
            owned.end(handle.session_id)
        assert [handle.session_id in owned for handle in handles] == [False, True, True]
        assert not caplog.records, "its owner had read it"

    run_virtual(main)

    async def unread() -> str:
        owned = OwnedSessions(make_gateway(ScriptedGenerator()), session_seconds=HOUR, max_ended=1)
        first, second = opened(owned), opened(owned)
        await asyncio.sleep(HOUR)
        owned.expire()
        assert second.session_id in owned
        return first.session_id

    with caplog.at_level(logging.WARNING):
        forgotten = run_virtual(unread)
    assert f"session {forgotten} is forgotten with its rows" in caplog.text


def test_many_sessions_that_fall_due_at_once_all_end_without_holding_up_the_loop() -> None:
    async def main() -> None:
        gateway, owned = made()
        loop = asyncio.get_running_loop()
        handles = [opened(owned) for _ in range(MAX_AT_ONCE * 3)]
        await asyncio.sleep(HOUR)
        assert owned.expire() == loop.time() and len(owned) == 2 * MAX_AT_ONCE
        expiring = loop.create_task(SessionExpiry(owned).run())
        await asyncio.sleep(1)
        assert len(owned) == 0 and owned.num_ended == len(handles) and len(gateway.registry) == 0
        expiring.cancel()

    run_virtual(main)


def test_an_untracked_session_keeps_counts_and_no_rows() -> None:
    async def main() -> None:
        gateway, owned = made()
        handle = owned.open(sampling=DEFAULTS, keeps_rows=False)
        await ask(gateway, handle)
        record = owned.end(handle.session_id).record
        assert (record.rows, record.num_turns) == ((), 1)

    run_virtual(main)
