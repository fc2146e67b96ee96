"""Answers that will not be trained say so: in their head, in the record of their session and in a fact, by the field that caused it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.gateway.asked import CONTENTS, streamed
from tests.gateway.offered import DEFAULTS, KEY, Offered, ScriptedGenerator, offered

from midflight.gateway.answers.plan import EngineLimits
from midflight.testing.virtual_time import run_virtual
from midflight.types import Feature, Kind, Reason, RolloutKey
from midflight.types.facts import SessionEnded

HI = [{"role": "user", "content": "hi"}]
CHAT = ("/v1/chat/completions", {"model": "policy", "messages": HI})
BODIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (*CHAT, ""),
    "completions": ("/v1/completions", {"model": "policy", "prompt": "hi"}, ""),
    "responses": ("/v1/responses", {"model": "policy", "input": "hi"}, ""),
    "messages": ("/v1/messages", {"model": "policy", "messages": HI, "max_tokens": 8}, ""),
    "contents": (CONTENTS, {"contents": [{"parts": [{"text": "hi"}]}]}, "generationConfig"),
    "native": ("/generate", {"text": "hi"}, "sampling_params"),
    "tokens": ("/inference/v1/generate", {"token_ids": [97, 98]}, "sampling_params"),
}
"""Path, body, and the object in which the body has its sampling."""
ABLE = EngineLimits(256, 262, features=frozenset(Feature) - {Feature.SAMPLING_MASKS})
OUTSIDE = RolloutKey(KEY.group, 0, Kind.OUTSIDE)


def body_of(dialect: str, sampling: dict[str, Any], *, stream: bool) -> tuple[str, dict[str, Any], str]:
    """Path, body, and what stands before a field's name where it is named."""
    path, body, place = BODIES[dialect]
    inside = {place: sampling} if place else sampling
    if dialect == "contents":
        return streamed(path) if stream else path, {**body, **inside}, f"{place}."
    return path, {**body, **inside, "stream": stream}, f"{place}." if place else ""


def top_p_of(dialect: str) -> str:
    return "topP" if dialect == "contents" else "top_p"


async def head(it: Offered, path: str, body: dict[str, Any], *, key: RolloutKey | None = KEY) -> dict[str, str]:
    """The answer's headers that tell of masking and of what was replaced; the session is closed."""
    prefix = ""
    if key is not None:
        session = it.gateway.open(key, sampling=DEFAULTS, tracked=True)
        prefix = f"/s/{session.api_key}"
    answer = await it.http.post(prefix + path, json=body)
    assert answer.status_code == 200, answer.text
    if key is not None:
        it.gateway.close(session.session_id)
    names = ("x-midflight-masked", "x-midflight-replaced")
    return {name: answer.headers[name] for name in names if name in answer.headers}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", BODIES)
def test_the_head_of_an_answer_names_the_fields_for_which_it_is_masked(dialect: str, stream: bool) -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(), limits=ABLE) as it:
            top_p = top_p_of(dialect)
            path, body, place = body_of(dialect, {"temperature": 0.2, top_p: 0.5}, stream=stream)
            told = await head(it, path, body)
            assert told == {"x-midflight-masked": f"not_policy_sampled; field={place}temperature; field={place}{top_p}"}
            (ended,) = it.seen.of(SessionEnded)
            number = ended.masked[Reason.NOT_POLICY_SAMPLED]
            assert number > 0 and ended.num_trainable == 0
            assert ended.masked_by == {f"{place}temperature": number, f"{place}{top_p}": number}
            path, body, _ = body_of(dialect, {"temperature": 1.0}, stream=stream)
            assert await head(it, path, body) == {}, "as the run samples"

    run_virtual(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", BODIES)
def test_the_runs_own_sampling_wins_where_it_is_told_to_and_is_named_in_the_head(dialect: str, stream: bool) -> None:
    async def main() -> None:
        generator = ScriptedGenerator()
        async with offered(generator, limits=ABLE, own_sampling=True) as it:
            seed = "sampling_seed" if dialect == "native" else "seed"
            top_p = top_p_of(dialect)
            path, body, place = body_of(dialect, {"temperature": 0.2, top_p: 0.5, seed: 3}, stream=stream)
            told = await head(it, path, body)
            assert told == {"x-midflight-replaced": f"{place}{seed}=own, {place}temperature=1.0, {place}{top_p}=1.0"}
            sampled = generator.requests[0].sampling
            assert (sampled.temperature, sampled.top_p) == (1.0, 1.0) and sampled.seed != 3
            assert not generator.requests[0].seeded
            (ended,) = it.seen.of(SessionEnded)
            assert ended.masked == {} and ended.num_trainable > 0
            assert ended.replaced == {f"{place}{seed}": 1, f"{place}temperature": 1, f"{place}{top_p}": 1}

    run_virtual(main())


def test_two_rollouts_that_send_one_seed_say_different_things_under_the_runs_sampling() -> None:
    async def main() -> None:
        generator = ScriptedGenerator()
        async with offered(generator, own_sampling=True) as it:
            for sample in range(2):
                await head(it, CHAT[0], {**CHAT[1], "seed": 3}, key=replace_sample(KEY, sample))
            assert generator.requests[0].sampling.seed != generator.requests[1].sampling.seed

    run_virtual(main())


def replace_sample(key: RolloutKey, sample: int) -> RolloutKey:
    return RolloutKey(key.group, sample, key.kind)


def test_only_sessions_that_train_are_masked_or_sampled_by_the_run() -> None:
    """Evaluations keep what their agent asks for, and so does whoever asks without a session."""
    evaluated = RolloutKey(KEY.group, 0, Kind.EVALUATION)

    async def main(own_sampling: bool) -> None:
        generator = ScriptedGenerator()
        async with offered(generator, own_sampling=own_sampling) as it:
            body = {**CHAT[1], "temperature": 0.2}
            for key in (evaluated, None):
                assert await head(it, CHAT[0], body, key=key) == {}
                assert generator.requests[-1].sampling.temperature == 0.2
            assert [fact.masked for fact in it.seen.of(SessionEnded)] == [{}]
            name = "x-midflight-replaced" if own_sampling else "x-midflight-masked"
            assert list(await head(it, CHAT[0], body, key=OUTSIDE)) == [name]

    for own_sampling in (False, True):
        run_virtual(main(own_sampling))


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}


@pytest.mark.parametrize("own_sampling", [False, True])
@pytest.mark.parametrize(
    ("fields", "named", "key"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", KEY),
        ({"guided_regex": "a+"}, "guided_regex", KEY),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", KEY),
        ({"tools": [STRICT]}, "tools.strict", OUTSIDE),
    ],
)
def test_a_form_that_the_client_reads_its_answer_by_is_kept_and_masks(
    fields: dict[str, Any], named: str, key: RolloutKey, own_sampling: bool
) -> None:
    async def main() -> None:
        generator = ScriptedGenerator()
        async with offered(generator, limits=ABLE, own_sampling=own_sampling) as it:
            told = await head(it, CHAT[0], {**CHAT[1], **fields}, key=key)
            assert told == {"x-midflight-masked": f"not_policy_sampled; field={named}"}
            assert generator.requests[0].sampling.grammar is not None

    run_virtual(main())


def test_sampling_of_the_sessions_own_is_named_as_such() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator()) as it:
            session = it.gateway.open(KEY, sampling=DEFAULTS.changed(top_k=5), tracked=True)
            answer = await it.http.post(f"/s/{session.api_key}/v1/chat/completions", json=CHAT[1])
            assert answer.headers["x-midflight-masked"] == "not_policy_sampled; field=sampling.top_k"
            record = it.gateway.close(session.session_id)
            assert list(record.masked_by) == ["sampling.top_k"]
            assert record.shares == {"trained": 0.0, "not_policy_sampled": 1.0}

    run_virtual(main())


def test_a_truncated_turn_that_engines_record_is_masked_only_for_an_owner_outside() -> None:
    recorded = replace(ABLE, features=frozenset(Feature))

    async def main() -> None:
        generator = ScriptedGenerator()
        async with offered(generator, limits=recorded) as it:
            body = {**CHAT[1], "top_p": 0.5}
            assert await head(it, CHAT[0], body) == {} and generator.requests[0].wants_kept
            told = await head(it, CHAT[0], body, key=OUTSIDE)
            assert told == {"x-midflight-masked": "not_policy_sampled; field=top_p"}
            first, second = it.seen.of(SessionEnded)
            # The scripted generator records nothing, which is known only at the end.
            assert list(first.masked_by) == ["top_p"] and list(second.masked_by) == ["top_p"]

    run_virtual(main())


def test_the_roles_of_a_session_and_its_turns_before_a_new_start_count_too() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["abc", "de", "f"])) as it:
            session = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            await it.http.post(f"/s/{session.api_key}/v1/chat/completions", json={**CHAT[1], "temperature": 0})
            await it.http.post(f"/s/{session.api_key}~critic/v1/chat/completions", json={**CHAT[1], "min_p": 0.1, "temperature": 0})
            await it.http.post(f"/s/{session.api_key}/v1/chat/completions", json={**CHAT[1], "messages": [*HI, *HI]})
            record = it.gateway.close(session.session_id)
            assert record.masked_by == {"temperature": 5, "min_p": 2} and record.num_trainable == 1
            assert record.masked == {Reason.NOT_POLICY_SAMPLED: 5}

    run_virtual(main())


def test_a_turn_that_is_given_again_after_a_crash_is_masked_by_the_same_fields() -> None:
    """I8."""

    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["abc"])) as it:
            session = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            body = {**CHAT[1], "temperature": 0.5}
            await it.http.post(f"/s/{session.api_key}/v1/chat/completions", json=body)
            again = it.gateway.reopen(session.session_id)
            await it.http.post(f"/s/{again.api_key}/v1/chat/completions", json=body)
            assert it.gateway.close(session.session_id).masked_by == {"temperature": 3}

    run_virtual(main())
