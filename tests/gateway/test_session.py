from __future__ import annotations

import hashlib
import struct
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.generating import begun, receive
from tests.gateway.offered import DEFAULTS, KEY

from midflight.errors import Overloaded, SessionClosed, Unauthorized, UnknownSession
from midflight.gateway.sessions.history import Prompt
from midflight.gateway.sessions.registry import SessionRegistry
from midflight.gateway.sessions.session import Messages, Session, request_seed
from midflight.testing.script import scripted_tokenizer
from midflight.text.formats import AssistantMessage
from midflight.types import Chunk, Finish, FinishReason, GroupKey, Reason, RolloutKey, SamplingParams

TOKENIZER = scripted_tokenizer()


def new_session() -> Session:
    return Session("mf-1", TOKENIZER, key=KEY, sampling=DEFAULTS, tracked=True)


def test_the_seed_is_the_documented_hash_of_who_asks_for_what() -> None:
    ids = (257, 104, 105)
    for occurrence in (0, 1):
        body = f"demo|17|0|3|0|1|{occurrence}|".encode("ascii") + struct.pack("<3i", *ids)
        expected = int.from_bytes(hashlib.blake2b(body, digest_size=8).digest(), "little")
        assert request_seed("demo", 17, KEY, occurrence=occurrence, prompt_ids=ids) == expected


def test_the_same_prompt_asked_again_gets_another_seed_and_an_explicit_seed_is_kept() -> None:
    session = new_session()

    def seed(ids: tuple[int, ...], asked: int | None = None, choice: int = 0) -> int:
        return session.seed("demo", 17, Prompt(ids, None), asked=asked, choice=choice)

    expected = [request_seed("demo", 17, KEY, occurrence=k, prompt_ids=(1,)) for k in range(3)]
    assert [seed((1,)), seed((1,))] == expected[:2]
    assert seed((1, 2)) == request_seed("demo", 17, KEY, occurrence=0, prompt_ids=(1, 2))
    assert [seed((1,), 5, 0), seed((1,), 5, 1), seed((1,), -1, 0)] == [5, 6, 2**64 - 1]


def test_segments_follow_the_versions_the_engine_attests() -> None:
    """I6."""
    session = new_session()
    answer = begun(session, session.plan(Messages(({"role": "user", "content": "x"},))))
    for ids, version, kv in [((1, 2), 3, 3), ((3,), 3, 3), ((4,), 4, 3), ((), 4, 4)]:
        receive(answer, Chunk(ids, (-1.0,) * len(ids), version, kv))
    receive(answer, Chunk((5,), (-1.0,), 4, 4, Finish(FinishReason.LENGTH)), num_overshoot=2)
    answer.num_attempts = 2
    closed = answer.close()
    assert [(s.version, s.kv_version, s.start, s.end) for s in closed.segments] == [(3, 3, 0, 3), (4, 3, 3, 4), (4, 4, 4, 5)]
    assert (closed.num_overshoot, closed.num_resumes) == (2, 1)
    assert session.oldest_version == 3


def test_a_closing_session_gives_what_is_under_way_its_fate() -> None:
    """I3: tokens of an answer that never ended are dropped(abandoned), and counted once."""
    session = new_session()
    answer = begun(session, session.plan(Messages(({"role": "user", "content": "x"},))))
    receive(answer, Chunk((1, 2), (-1.0, -1.0), 0, 0))
    record = session.close()
    session.abandoned(answer)
    assert record.dropped == {Reason.ABANDONED: 2}
    assert record.rows == () and record.num_turns == 0


def registry(max_sessions: int = 2) -> SessionRegistry:
    return SessionRegistry(TOKENIZER, max_sessions=max_sessions)


def test_only_the_whole_token_opens_a_session() -> None:
    sessions = registry()
    handle = sessions.open(KEY, sampling=DEFAULTS, tracked=True, address="http://here:1")
    assert handle.base_url == f"http://here:1/s/{handle.api_key}/v1"
    assert sessions.authorised(handle.api_key).session_id == handle.session_id
    for wrong in (handle.api_key[:-1], handle.session_id, f"{handle.session_id}.", f"{handle.session_id}.\ud800"):
        with pytest.raises(Unauthorized):
            sessions.authorised(wrong)
    with pytest.raises(UnknownSession):
        sessions.authorised("mf-9-9.secret")


def test_the_secret_is_in_no_repr() -> None:
    sessions = registry()
    handle = sessions.open(KEY, sampling=DEFAULTS, tracked=True, address="http://here")
    secret = handle.api_key.partition(".")[2]
    assert len(secret) >= 24
    shown = repr(handle) + repr(sessions) + repr(sessions.get(handle.session_id))
    assert secret not in shown and handle.session_id in shown
    with pytest.raises(Unauthorized) as caught:
        sessions.authorised(f"{handle.session_id}.guess")
    assert secret not in str(caught.value) and "guess" not in str(caught.value)


def test_an_ended_session_says_so_and_hands_its_tokens_over_once() -> None:
    """I3."""
    sessions = registry()
    handle = sessions.open(KEY, sampling=DEFAULTS, tracked=True, address="")
    session = sessions.get(handle.session_id)
    answer = begun(session, session.plan(Messages(({"role": "user", "content": "x"},))))
    receive(answer, Chunk((1,), (-1.0,), 0, 0, Finish(FinishReason.LENGTH)))
    session.finished(answer, answer.close(), reply="x", message=AssistantMessage("x"))
    assert len(sessions.close(handle.session_id).rows) == 1
    again = sessions.close(handle.session_id)
    assert (again.rows, again.num_turns, again.truncated) == ((), 1, True)
    with pytest.raises(SessionClosed):
        sessions.authorised(handle.api_key)
    with pytest.raises(UnknownSession):
        sessions.close("mf-unknown")


def test_the_record_says_how_near_an_answer_came_to_its_own_limit() -> None:
    sessions = registry()
    handle = sessions.open(KEY, sampling=DEFAULTS, tracked=True, address="")
    session = sessions.get(handle.session_id)
    for ids in ((1,), (1, 2, 3), (1, 2)):
        answer = begun(session, session.plan(Messages(({"role": "user", "content": "x"},))))
        receive(answer, Chunk(ids, (-1.0,) * len(ids), 0, 0, Finish(FinishReason.STOP)))
        session.finished(answer, answer.close(), reply="x", message=AssistantMessage("x"))
    limit = answer.request.sampling.max_tokens
    assert sessions.close(handle.session_id).room == limit - 3, "not the sum of its answers"


def test_sessions_are_bounded() -> None:
    sessions = registry(max_sessions=1)
    handle = sessions.open(KEY, sampling=DEFAULTS, tracked=True, address="")
    with pytest.raises(Overloaded, match="max_sessions"):
        sessions.open(KEY, sampling=DEFAULTS, tracked=True, address="")
    sessions.close(handle.session_id)
    assert sessions.open(KEY, sampling=DEFAULTS, tracked=True, address="").session_id != handle.session_id


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[int, str, list[tuple[str, bool, int]], bool]]:
    """Requests: which earlier reply to go on from, what is said, the choices (text, ends, overshoot), policy-sampled or not."""
    choice = st.tuples(st.text("ab", min_size=0, max_size=3), st.booleans(), st.integers(0, 2))
    request = st.tuples(st.integers(0, 6), st.text("xy", max_size=2), st.lists(choice, min_size=1, max_size=3), st.booleans())
    return draw(st.lists(request, max_size=7))


@given(conversations())
@settings(max_examples=150, deadline=None)
def test_every_generated_token_is_trained_in_one_row_or_has_one_reason(
    requests: list[tuple[int, str, list[tuple[str, bool, int]], bool]],
) -> None:
    """I3, over conversations that branch, repeat themselves, take one of n, are cut, or end in the middle."""
    session = new_session()
    histories: list[tuple[dict[str, str], ...]] = [()]
    fates: Counter[str] = Counter()
    num_tokens = num_overshoot = serial = 0
    for origin, said, choices, sampled in requests:
        messages = (*histories[origin % len(histories)], {"role": "user", "content": said})
        prompt, number = session.plan(Messages(messages)), session.next_request()
        assert TOKENIZER.decode(prompt.ids) == TOKENIZER.render(messages, add_generation_prompt=True)
        for text, ends, overshoot in choices:
            serial += 1
            ids = TOKENIZER.encode(text + ("<|end|>" if ends else ""))
            # The version of each turn is its serial number, so that rows show whose tokens they hold.
            answer = begun(session, prompt, policy_sampled=sampled, number=number)
            finish = Finish(FinishReason.STOP, 256) if ends else Finish(FinishReason.LENGTH)
            receive(answer, Chunk(ids, (-1.0,) * len(ids), serial, serial, finish), num_overshoot=overshoot)
            num_tokens += len(ids)
            num_overshoot += overshoot
            if text == "aaa":
                session.abandoned(answer)
            else:
                session.finished(answer, answer.close(), reply=text, message=AssistantMessage(text))
                histories.append((*messages, {"role": "assistant", "content": text}))
    record = session.close()
    for row in record.rows:
        assert not (row.loss_mask & ~row.generated).any()
        for version in row.versions[row.loss_mask]:
            fates[str(version)] += 1
    trained = sum(row.num_trainable for row in record.rows)
    dropped = dict(record.dropped)
    assert dropped.pop(Reason.OVERSHOOT, 0) == num_overshoot
    assert trained + sum(record.masked.values()) + sum(dropped.values()) == num_tokens
    for version, count in fates.items():
        holders = [r for r in record.rows if (r.loss_mask & (r.versions == int(version))).any()]
        assert len(holders) == 1, "a turn's tokens are trained in one row"
        assert count == int((holders[0].generated & (holders[0].versions == int(version))).sum())


def answer(session: Session, source: Messages, *texts: str) -> None:
    """One request with a choice for each text."""
    prompt, number = session.plan(source), session.next_request()
    for text in texts:
        ids = TOKENIZER.encode(text + "<|end|>")
        answer = begun(session, prompt, policy_sampled=True, number=number)
        receive(answer, Chunk(ids, (-1.0,) * len(ids), 0, 0, Finish(FinishReason.STOP, 256)))
        session.finished(answer, answer.close(), reply=text, message=AssistantMessage(text))


@pytest.mark.parametrize(("count_all", "trained", "dropped"), [(False, ["AC"], {Reason.UNCHOSEN: 3}), (True, ["BB", "AC"], {})])
def test_choices_left_aside_are_trained_only_where_the_session_says_that_all_count(
    count_all: bool, trained: list[str], dropped: dict[Reason, int]
) -> None:
    """The text "BB" and its end are three tokens."""
    sessions = registry()
    handle = sessions.open(KEY, sampling=DEFAULTS, tracked=True, address="", count_all_choices=count_all)
    session = sessions.get(handle.session_id)
    user = {"role": "user", "content": "x"}
    answer(session, Messages((user,)), "A", "BB")
    answer(session, Messages((user, {"role": "assistant", "content": "A"}, user)), "C")
    record = sessions.close(handle.session_id)
    assert sorted(TOKENIZER.decode(r.token_ids[r.loss_mask].tolist(), skip_special=True) for r in record.rows) == sorted(trained)
    assert record.dropped == dropped


def test_the_record_says_how_often_a_history_was_rewritten_and_how_often_text_would_have_other_ids() -> None:
    sessions = registry()
    handle = sessions.open(KEY, sampling=DEFAULTS, tracked=True, address="")
    session = sessions.get(handle.session_id)
    user = {"role": "user", "content": "x"}
    answer(session, Messages((user,)), " A")
    answer(session, Messages((user, {"role": "assistant", "content": "A"}, user)), "B")
    answer(session, Messages((user, {"role": "assistant", "content": "edited"}, user)), "C")
    record = sessions.close(handle.session_id)
    assert (record.num_turns, record.num_branches, record.num_rewritten, record.num_mismatches) == (3, 1, 1, 1)
    again = sessions.close(handle.session_id)
    assert (again.rows, again.num_rewritten, again.num_mismatches) == ((), 1, 1)


def test_a_prompt_asked_often_is_remembered_by_its_digest() -> None:
    """Not by its tokens."""
    session = new_session()
    for length in (10, 100_000):
        session.seed("demo", 17, Prompt((1,) * length, None), asked=None, choice=0)
    assert {len(key) for key in session._asked} == {16}


def test_other_rollouts_have_other_seeds() -> None:
    other = RolloutKey(GroupKey(0, 3, 0), sample=2)
    assert request_seed("r", 0, KEY, occurrence=0, prompt_ids=(1,)) != request_seed("r", 0, other, occurrence=0, prompt_ids=(1,))


def test_defaults_of_a_session_are_its_own() -> None:
    assert Session("mf-2", TOKENIZER, key=KEY, sampling=SamplingParams(max_tokens=3), tracked=False).sampling == SamplingParams(
        max_tokens=3
    )


def test_tokens_are_numbered_by_the_answer_that_they_are_of() -> None:
    sessions = registry()
    handle = sessions.open(KEY, sampling=DEFAULTS, tracked=True, address="")
    session = sessions.get(handle.session_id)
    for text, ids in (("x", (1,)), ("y", (2, 3))):
        answer = begun(session, session.plan(Messages(({"role": "user", "content": text},))), number=session.next_request())
        receive(answer, Chunk(ids, (-1.0,) * len(ids), 0, 0, Finish(FinishReason.STOP)))
        session.finished(answer, answer.close(), reply=text, message=AssistantMessage(text))
    record = sessions.close(handle.session_id)
    assert record.num_answers == 2
    assert [row.turns[row.generated].tolist() for row in record.rows if row.turns is not None] == [[0], [1, 1]]


def test_ids_of_one_of_several_gateways_begin_with_it_and_those_of_one_alone_as_ever() -> None:
    alone, second = SessionRegistry(TOKENIZER, max_sessions=1), SessionRegistry(TOKENIZER, max_sessions=1, shard=1)
    names = [of.open(KEY, sampling=DEFAULTS, tracked=True, address="http://x").session_id for of in (alone, second)]
    assert names == [f"mf-{KEY}-1", f"mf-s1-{KEY}-1"]
    assert second.is_session_token(f"{names[1]}.secret")
