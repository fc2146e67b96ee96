"""What the engines behind the gateway can take, and what becomes of a turn that they can't tell truly."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.gateway.offered import DEFAULTS, KEY, ScriptedGenerator, offered
from tests.gateway.test_dialects_names import DIALECTS

from midflight.errors import RequestRejected
from midflight.gateway.answers.plan import EngineLimits, params_for, samples_the_policy
from midflight.gateway.dialects.exchange import Exchange
from midflight.testing.scripted import CAPABLE
from midflight.testing.virtual_time import run_virtual
from midflight.types import Feature, LogprobKind, Reason, SamplingParams

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
    fields: dict[str, Any] = {"sampling_params": {"sampling_seed": 0}} if dialect == "native" else {"seed": 0}
    name = "sampling_params.sampling_seed" if dialect == "native" else "seed"
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
    assert samples_the_policy(params, params, limits=limits) is told


@pytest.mark.parametrize(("temperature", "trainable"), [(1.0, True), (0.7, False)])
def test_turns_at_another_temperature_are_kept_out_of_the_loss_where_logprobs_are_raw(temperature: float, trainable: bool) -> None:
    async def main() -> None:
        limits = replace(UNSEEDED, logprob_kinds=frozenset({LogprobKind.RAW}))
        generator = ScriptedGenerator()
        async with offered(generator, limits=limits) as it:
            session = it.gateway.open(KEY, sampling=replace(DEFAULTS, temperature=temperature), tracked=True)
            sdk = it.sdk(base_url=f"http://memory/s/{session.api_key}/v1", api_key=session.api_key)
            await sdk.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
            assert generator.requests[0].sampling.seed, "the session's own seed is sent, honoured or not"
            record = it.gateway.close(session.session_id)
            assert (len(record.rows), set(record.masked)) == ((1, set()) if trainable else (0, {Reason.NOT_POLICY_SAMPLED}))

    run_virtual(main())
