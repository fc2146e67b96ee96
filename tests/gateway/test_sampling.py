"""What the engines behind the gateway can take, and what becomes of a turn that they can't tell truly."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.gateway.offered import DEFAULTS, KEY, ScriptedGenerator, offered
from tests.gateway.test_dialects_names import DIALECTS

from midflight.errors import EngineUnavailable, RequestRejected
from midflight.gateway.answers.answer import Answer
from midflight.gateway.answers.plan import EngineLimits, params_for, unlike_the_policy
from midflight.gateway.dialects.exchange import Exchange
from midflight.gateway.sessions.history import Node, Prompt
from midflight.testing.script import scripted_tokenizer
from midflight.testing.scripted import CAPABLE
from midflight.testing.virtual_time import run_virtual
from midflight.trajectories.database import decode_turn, encode_turn
from midflight.types import (
    Chunk,
    Feature,
    Finish,
    FinishReason,
    GenerateRequest,
    Grammar,
    GrammarKind,
    Kind,
    LogprobKind,
    Reason,
    RolloutKey,
    SamplingParams,
)

UNSEEDED = EngineLimits(max_context=256, vocab_size=262, honours_seed=False)


def test_a_gateway_promises_what_all_its_engines_can() -> None:
    small = replace(CAPABLE, max_context=64, vocab_size=100, features=frozenset({Feature.GRAMMARS, Feature.PENALTIES}))
    other = replace(CAPABLE, honours_seed=False, logprob_kind=LogprobKind.RAW, features=frozenset({Feature.GRAMMARS}))
    assert EngineLimits.of([CAPABLE]) == EngineLimits(4096, 262, features=CAPABLE.features)
    assert EngineLimits.of([small, other]) == EngineLimits(
        max_context=64,
        vocab_size=100,
        features=frozenset({Feature.GRAMMARS}),
        honours_seed=False,
        logprob_kinds=frozenset({LogprobKind.SAMPLED, LogprobKind.RAW}),
    )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_seed_that_an_engine_would_not_honour_is_refused_by_name(dialect: str) -> None:
    kind, body = DIALECTS[dialect]
    places = {"native": ("sampling_params", "sampling_seed"), "contents": ("generationConfig", "seed")}
    place = places.get(dialect, ("seed",))
    fields: dict[str, Any] = {place[0]: {place[1]: 0}} if len(place) > 1 else {"seed": 0}
    name = ".".join(place)
    asking: Exchange = kind(json.dumps(body | fields).encode())
    with pytest.raises(RequestRejected, match=f"^{name} .*leave it out") as caught:
        params_for(asking.call, 10, defaults=None, limits=UNSEEDED)
    assert caught.value.param == name
    silent: Exchange = kind(json.dumps(body).encode())
    params_for(silent.call, 10, defaults=None, limits=UNSEEDED)
    params_for(asking.call, 10, defaults=None, limits=replace(UNSEEDED, honours_seed=True))


@pytest.mark.parametrize(
    ("kind", "temperature", "told"),
    [
        (LogprobKind.SAMPLED, 0.7, True),
        (LogprobKind.TEMPERATURE, 0.7, True),
        (LogprobKind.RAW, 0.7, False),
        (LogprobKind.RAW, 1.0, True),
    ],
)
def test_a_turn_is_of_the_policy_only_where_its_logprobs_are_of_the_temperature_it_was_sampled_at(
    kind: LogprobKind, temperature: float, told: bool
) -> None:
    """A turn that was sampled from another distribution is masked in training."""
    limits = EngineLimits(256, 262, logprob_kinds=frozenset({LogprobKind.SAMPLED, kind}))
    params = SamplingParams(temperature=temperature)
    assert unlike_the_policy(params, params, limits=limits) == (() if told else ("temperature",))


@pytest.mark.parametrize(("temperature", "trainable"), [(1.0, True), (0.7, False)])
def test_turns_at_another_temperature_are_kept_out_of_the_loss_where_logprobs_are_raw(temperature: float, trainable: bool) -> None:
    async def main() -> None:
        limits = replace(UNSEEDED, logprob_kinds=frozenset({LogprobKind.RAW}))
        generator = ScriptedGenerator()
        async with offered(generator, limits=limits) as it:
            session = it.gateway.open(KEY, sampling=DEFAULTS.changed(temperature=temperature), tracked=True)
            sdk = it.sdk(base_url=f"http://memory/s/{session.api_key}/v1", api_key=session.api_key)
            await sdk.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
            assert generator.requests[0].sampling.seed, "the session's own seed is sent, honoured or not"
            record = it.gateway.close(session.session_id)
            assert (len(record.rows), set(record.masked)) == ((1, set()) if trainable else (0, {Reason.NOT_POLICY_SAMPLED}))

    run_virtual(main())


MASKS = EngineLimits(256, 262, features=frozenset({Feature.SAMPLING_MASKS}))


@pytest.mark.parametrize(
    ("params", "trained"),
    [
        (SamplingParams(top_p=0.9), True),
        (SamplingParams(top_k=5, min_p=0.1, top_p=0.9), True),
        (SamplingParams(top_p=0.9, temperature=0.0), False),
        (SamplingParams(top_k=5, presence_penalty=0.5), False),
        (SamplingParams(top_k=5, logit_bias=((3, 1.0),)), False),
        (SamplingParams(top_k=5, grammar=Grammar(GrammarKind.REGEX, "a")), False),
        (SamplingParams(top_k=5, min_tokens=2), False),
    ],
)
def test_a_truncated_turn_is_of_the_policy_where_engines_say_what_was_kept_and_nothing_else_shapes_it(
    params: SamplingParams, trained: bool
) -> None:
    assert (not unlike_the_policy(params, params, limits=MASKS)) is trained
    assert unlike_the_policy(params, params, limits=UNSEEDED) == params.reshaped_by
    assert unlike_the_policy(params, params.changed(temperature=0.7), limits=MASKS)[0] == "temperature"


@pytest.mark.parametrize(("kind", "wanted"), [(Kind.TRAINING, True), (Kind.EVALUATION, False), (Kind.OUTSIDE, False)])
def test_what_was_kept_is_asked_for_only_where_it_is_trained(kind: Kind, wanted: bool) -> None:
    async def main() -> None:
        generator = ScriptedGenerator()
        async with offered(generator, limits=MASKS) as it:
            session = it.gateway.open(RolloutKey(KEY.group, KEY.sample, kind), sampling=DEFAULTS.changed(top_p=0.9), tracked=True)
            sdk = it.sdk(base_url=f"http://memory/s/{session.api_key}/v1", api_key=session.api_key)
            await sdk.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
            await sdk.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}], top_p=1.0, seed=4)
            assert [request.wants_kept for request in generator.requests] == [wanted, False]
            assert [request.seeded for request in generator.requests] == [False, True]
            # The scripted answers have no records, so that the first is context in any case.
            record = it.gateway.close(session.session_id)
            assert (len(record.rows), set(record.masked)) == (1, {Reason.NOT_POLICY_SAMPLED})

    run_virtual(main())


def answer_of(params: SamplingParams) -> Answer:
    request = GenerateRequest("r", (65, 66), 2, params, wants_kept=True, seeded=True)
    return Answer(request, Prompt((65, 66), None), scripted_tokenizer())


def test_i6_records_stay_with_their_tokens_over_attempts_and_past_a_stop_string() -> None:
    answer = answer_of(SamplingParams(max_tokens=9, top_p=0.9, stop=("END",)))
    answer.next_request("first")
    answer.accept(Chunk(tuple(b"ab"), (-1.0, -1.0), 0, 0, Finish(FinishReason.ABORT), kept=(b"1", b"2")), vocab_size=262)
    assert answer.next_request("second").wants_kept and answer.next_request("second").seeded
    answer.accept(Chunk(tuple(b"cENDx"), (-1.0,) * 5, 1, 1, kept=(b"3", b"4", b"5", b"6", b"7")), vocab_size=262)
    turn = answer.close()
    assert (bytes(turn.output_ids), turn.kept, turn.num_overshoot) == (b"abcEND", (b"1", b"2", b"3", b"4", b"5", b"6"), 1)
    assert turn.policy_sampled
    # I8: a turn that was complete before a crash comes back from the store with them, and from a session that begins again.
    stored = decode_turn(encode_turn(turn))
    assert stored == turn
    again = answer_of(SamplingParams(max_tokens=9, top_p=0.9))
    again.replay(stored)
    assert again.close().kept == turn.kept and again.turn.policy_sampled
    assert Node.of(Prompt((65, 66), None), turn, reply="abc", request=0).turn.kept == turn.kept


def test_a_turn_of_which_an_engine_left_records_out_is_context_and_a_chunk_out_of_step_is_nonsense() -> None:
    answer = answer_of(SamplingParams(max_tokens=3, top_p=0.9))
    answer.next_request("first")
    answer.accept(Chunk((5,), (-1.0,), 0, 0, kept=(b"1",)), vocab_size=262)
    with pytest.raises(EngineUnavailable, match="it says of 1 tokens what truncation kept"):
        answer.accept(Chunk((6, 7), (-1.0, -1.0), 0, 0, kept=(b"1",)), vocab_size=262)
    answer.accept(Chunk((6, 7), (-1.0, -1.0), 0, 0, Finish(FinishReason.LENGTH)), vocab_size=262)
    turn = answer.close()
    assert turn.output_ids == (5, 6, 7) and turn.kept == () and not turn.policy_sampled
