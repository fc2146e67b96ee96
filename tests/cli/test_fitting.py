"""The numbers that `midflight init --model` writes, worked out of what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from midflight.cli.fitting import MEMORY_SHARE, Choice, Fit, Fitting, OwnMachine, fit
from midflight.config.derived import model_sizes
from midflight.config.memory import memory_estimate, total_bytes
from midflight.errors import ConfigError
from midflight.models.sizes import sizes_of
from midflight.run.launcher.measurements import ModelMeasurements

GB = 2**30
SIZES = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""Those of SmolLM2-135M."""

MEASURED = ModelMeasurements(
    threads=1,
    prompt_length=40,
    longest_prompt=50,
    ended=(8, 10, 12, 12, 13, 14, 15, 15, 16, 18, 18, 20, 20, 21, 22, 24),
    num_cut=0,
    most_tokens=64,
    num_right=4,
    reward="number_match",
    closes=True,
    question="What is 1 + 2?",
    answer="1 + 2 = 3.",
    engine_rates=((1, 16.0), (8, 70.0), (32, 150.0)),
    trainer_rate=50.0,
)


@pytest.fixture
def given(tmp_path: Path) -> Fitting:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    tasks = (Choice("environment.sources", [{"dataset": "chain_sum"}]),)
    return Fitting(tmp_path, sizes_of(tmp_path), MEASURED, OwnMachine(cores=2, memory_bytes=24 * GB), tasks)


def measured(given: Fitting, **changed: object) -> Fit:
    return fit(replace(given, measured=msgspec.structs.replace(MEASURED, **changed)))


def test_a_small_model_that_talks_gets_numbers_of_its_size(given: Fitting) -> None:
    config = fit(given).config
    assert config.trainer.learning_rate == 2e-5 and config.lora.rank is None
    # The longest of 16 answers had 24 tokens: 30 with a quarter more, 32 as a multiple of eight; the context is twice 50 + 32, as 64s.
    assert (config.environment.max_tokens, config.model.max_context) == (32, 192)
    # 32 requests at once make 150 / 70 = 2.1 times the tokens of 8: more would make still more.
    assert config.engine.max_running == 64
    assert (config.engine.threads, config.trainer.threads) == (1, 1)
    assert not config.warm_start.is_made


def test_a_step_has_as_many_groups_as_fit_a_minute(given: Fitting) -> None:
    # An answer has 16.1 tokens: 128 of them and 16 prompts of 40 take the trainer 54 s at 50 tokens a second.
    found = fit(given)
    assert found.config.rollout.groups_per_step == 16 and found.step_seconds == pytest.approx((128 * 258 / 16 + 640) / 50)
    assert measured(given, trainer_rate=25.0).config.rollout.groups_per_step == 8
    slow = measured(given, trainer_rate=2.0)
    assert slow.config.rollout.groups_per_step == 4 and slow.step_seconds > 60


def test_rare_right_answers_get_larger_groups(given: Fitting) -> None:
    assert fit(given).config.rollout.group_size == 8
    assert measured(given, num_right=1).config.rollout.group_size == 16


def test_an_engine_that_gains_nothing_by_more_requests_gets_fewer_slots(given: Fitting) -> None:
    assert measured(given, engine_rates=((1, 16.0), (8, 140.0), (32, 150.0))).config.engine.max_running == 8
    assert measured(given, engine_rates=((1, 16.0), (8, 120.0), (32, 150.0))).config.engine.max_running == 32


def test_cores_are_shared_by_what_each_side_has_to_do(given: Fitting) -> None:
    # Of 16 groups an engine of 150 tokens a second has 13.8 s, a trainer of 50 has 54.1 s: 16 x 13.8 / 67.9 = 3.3.
    many = replace(given, machine=replace(given.machine, cores=16))
    config = fit(many).config
    assert (config.engine.threads, config.trainer.threads) == (3, 13)
    one = fit(replace(given, machine=replace(given.machine, cores=1))).config
    assert (one.engine.threads, one.trainer.threads) == (1, 1)


def test_answers_that_do_not_end_get_the_room_of_a_talking_model_and_a_word_about_it(given: Fitting) -> None:
    found = measured(given, ended=(40,) * 12, num_cut=4, most_tokens=126)
    assert found.config.environment.max_tokens == 256 and not found.config.warm_start.is_made
    why = next(choice.why for choice in found.choices if choice.option == "environment.max_tokens")
    assert "4 had not ended after 126" in why and "answers_cut" in why


@pytest.mark.parametrize(
    ("changed", "is_taught"),
    [
        ({"closes": False}, True),
        ({"ended": (3, 4), "num_cut": 14, "most_tokens": 256}, True),
        ({"ended": (3, 4), "num_cut": 14, "most_tokens": 32}, False),
    ],
)
def test_only_a_model_that_does_not_end_its_answers_is_taught_to(given: Fitting, changed: dict[str, object], is_taught: bool) -> None:
    """A large model is tried with short answers, which say nothing of it."""
    config = measured(given, **changed).config
    assert config.warm_start.is_made is is_taught
    if is_taught:
        assert (config.warm_start.target_accuracy, config.warm_start.learning_rate) == (0.3, 2e-4)


def test_less_memory_takes_smaller_micro_batches_then_fewer_slots_then_adapters_and_then_is_refused(given: Fitting) -> None:
    def of(memory: float) -> Fit:
        return fit(replace(given, machine=OwnMachine(2, int(memory * GB))))

    expected = {24: (2048, 64, None), 15.5: (1024, 64, None), 14.25: (512, 64, None), 13.5: (512, 8, None), 12: (2048, 64, 16)}
    for memory, shape in expected.items():
        config = of(memory).config
        assert (config.trainer.micro_batch_tokens, config.engine.max_running, config.lora.rank) == shape, memory
        assert total_bytes(memory_estimate(config, model_sizes(config.model))) == of(memory).num_bytes <= MEMORY_SHARE * memory * GB
    assert of(11).config.trainer.learning_rate == 2e-4, "adapters take larger steps"
    with pytest.raises(ConfigError, match=r"134,.* parameters: to train even adapters of it would take .* and this machine has 1.0 GB"):
        of(1)


def test_adapters_that_are_asked_for_are_taken(given: Fitting) -> None:
    found = fit(replace(given, rank=4))
    assert found.config.lora.rank == 4 and found.config.trainer.learning_rate == 2e-4
    assert "as asked" in next(choice.why for choice in found.choices if choice.option == "lora.rank")


def test_a_model_of_a_short_context_leaves_room_for_the_prompt(given: Fitting) -> None:
    config = fit(replace(given, sizes=replace(given.sizes, max_context=64))).config
    assert (config.model.max_context, config.environment.max_tokens) == (64, 13)
