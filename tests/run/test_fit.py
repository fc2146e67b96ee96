"""Sizes that are absurd for what a run has are refused with what there is; what is only much is allowed. On a machine that tests make up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from midflight.cli import main
from midflight.config import load_config
from midflight.errors import ConfigError
from midflight.run.launcher.checks import fit
from midflight.run.launcher.checks.fit import Hardware, hardware_of, memory_note, memory_words, misfits
from midflight.run.places.cluster import Machine

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"
SMALL = Hardware("this machine", cores=2, memory_bytes=8 * 2**30, most_cores=2)
LARGE = Hardware("this machine", cores=256, memory_bytes=2 * 2**40, most_cores=256)


def said(*overrides: str, hardware: Hardware = SMALL, trains: bool = True) -> list[str]:
    return [*misfits(load_config(DEMO, overrides), hardware, trains=trains)]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["engine.count=10000"], "engine.count is 10,000, so that 10,001 threads would compute, and this machine has 2 cores; lower it."),
        (["trainer.ranks=500"], "trainer.ranks is 500, so that 501 threads would compute, and this machine has 2 cores; lower it."),
        (["engine.threads=100000"], "engine.threads is 100,000, and this machine has 2 cores; lower it to at most 2."),
        (["trainer.threads=100000"], "trainer.threads is 100,000, and this machine has 2 cores; lower it to at most 2."),
        (["environment.workers=100000"], "environment.workers is 100,000: the parts of the run would take 68"),
        (["lora.rank=129"], "lora.rank is 129, and the layers of the model are 128 wide: adapters would be larger than what they adapt"),
        (["engine.max_running=10000000"], "engine.max_running is 10,000,000, model.max_context is 64, engine.count is 1: keys and values"),
        (["engine.kind=vllm", "engine.max_running=1000000"], "engine.max_running is 1,000,000: the parts of the run would take"),
        (["engine.prefix_mb=1000000"], "engine.prefix_mb is 1,000,000, engine.count is 1: kept keys and values of requests"),
        (["model.max_context=1000000000"], "lower model.max_context."),
        (["model.hidden_size=1000000"], "model.hidden_size is 1,000,000: the parts of the run would take"),
        (["model.num_layers=1000000"], "model.num_layers is 1,000,000: the parts of the run would take"),
        (["model.intermediate_size=100000000"], "model.intermediate_size is 100,000,000: the parts of the run would take"),
        (["rollout.groups_per_step=100000000", "rollout.buffer_groups=none"], "lower rollout.groups_per_step."),
        (["rollout.group_size=100000000", "rollout.max_in_flight=none", "gateway.max_sessions=1000000000"], "lower rollout.group_size."),
        (["rollout.max_in_flight=1000000000", "gateway.max_sessions=1000000000"], "lower rollout.max_in_flight."),
        (["environment.sources.0.size=1000000000"], "environment.sources.0.size is 1,000,000,000: the parts of the run would take"),
        (["environment.sources.1.heldout=100000000"], "lower environment.sources.1.heldout."),
        (["trainer.micro_batch_tokens=1000000000", "rollout.groups_per_step=16000", "rollout.buffer_groups=none"], "micro-batch"),
    ],
)
def test_an_absurd_size_is_refused_in_one_sentence_with_what_there_is(overrides: list[str], expected: str) -> None:
    (sentence,) = said(*overrides)
    assert expected in sentence and sentence.endswith(".")
    assert "this machine has 2 cores" in sentence or "this machine has 8.0 GB of memory" in sentence or "128 wide" in sentence


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["engine.count=4", "trainer.ranks=2"],
        ["engine.count=8", "engine.threads=4"],
        ["engine.threads=16"],
        ["environment.workers=64"],
        ["lora.rank=128"],
        ["engine.max_running=4096"],
        ["rollout.max_staleness=1000000"],
        ["trainer.micro_batch_tokens=1000000000"],
        ["trainer.keep_checkpoints=1000000000"],
    ],
)
def test_what_is_only_much_is_allowed(overrides: list[str]) -> None:
    assert said(*overrides) == []


def test_what_is_absurd_on_a_small_machine_is_not_on_a_large_one() -> None:
    many = ["engine.count=256", "trainer.ranks=8", "environment.workers=512"]
    assert said(*many) and not said(*many, hardware=LARGE)


def test_several_absurd_sizes_are_said_at_once() -> None:
    assert [sentence.partition(" ")[0] for sentence in said("engine.threads=100000", "lora.rank=4096", "trainer.threads=5000")] == [
        "engine.threads",
        "trainer.threads",
        "lora.rank",
    ]


def test_what_is_on_gpus_is_not_held_against_the_memory_of_the_machine() -> None:
    wide = ["model.hidden_size=8192", "model.intermediate_size=16384", "model.num_layers=8", "model.num_heads=64"]
    host = replace(SMALL, memory_bytes=64 * 2**30)
    on_gpus = ["trainer.device=cuda", "engine.device=cuda", "weights.transport=pull"]
    assert said(*wide, hardware=host)
    assert not said(*wide, *on_gpus, hardware=host)
    assert said(*wide, *on_gpus), "a checkpoint on its way to the disk lies in the machine's memory"


def test_servers_without_a_trainer_are_not_held_against_what_training_would_take() -> None:
    wide = ["model.hidden_size=2048", "model.intermediate_size=8192", "model.num_layers=12", "model.num_heads=16"]
    assert said(*wide) and not said(*wide, trains=False)


def test_a_cluster_is_taken_with_all_its_machines_and_a_process_with_the_largest() -> None:
    machines = [Machine(str(i), f"10.0.0.{i}", {"CPU": 16.0, "memory": 64.0 * 2**30}) for i in range(4)]
    cluster = hardware_of(machines)
    assert cluster == Hardware("the cluster", cores=64, memory_bytes=256 * 2**30, most_cores=16)
    assert not said("engine.count=100", hardware=cluster)
    (sentence,) = said("engine.threads=1000", hardware=cluster)
    assert "the largest machine of the cluster has 16 cores; lower it to at most 16." in sentence
    (sentence,) = said("environment.workers=100000", hardware=replace(cluster, cores=10**9, most_cores=10**9))
    assert "the cluster has 256.0 GB of memory; lower environment.workers." in sentence
    assert not said("engine.count=1000000", hardware=hardware_of([])), "of a cluster that says nothing nothing is held against it"


def test_a_worst_case_beyond_the_memory_is_said() -> None:
    config = load_config(DEMO, ["engine.max_running=100000"])
    assert memory_note(load_config(DEMO, []), SMALL) is None
    assert "this machine has 8.0 GB of memory" in (memory_note(config, SMALL) or "")
    assert not [*misfits(config, SMALL)]


@pytest.mark.parametrize("size", ["engine.count=10000", "trainer.ranks=500", "engine.threads=100000", "lora.rank=4096"])
def test_the_dry_run_refuses_absurd_sizes_with_status_2_before_anything_is_tried(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fit, "this_hardware", lambda: SMALL)
    assert main(["train", str(DEMO), "--dry-run", "--set", size, "--set", "environment.entry=no_such_module:solve"]) == 2
    told = capsys.readouterr().err
    option, _, value = size.partition("=")
    assert told.startswith(f"midflight: {option} is {int(value):,}") and "no_such_module" not in told and len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.updates_per_step=17"], "trainer.updates_per_step (17) is more than rollout.groups_per_step (16)"),
        (["rollout.max_in_flight=10001"], "rollout.max_in_flight (10001) is more than gateway.max_sessions (10000)"),
        (["engine.guesses=256"], "engine.guesses (256) must be less than model.max_context (256)"),
    ],
)
def test_sizes_that_other_options_bound_are_refused_with_those(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, overrides)
    assert expected in str(refused.value)


def test_whoever_has_too_little_memory_is_told_what_there_is_what_is_estimated_and_what_to_change() -> None:
    words = memory_words(load_config(DEMO, ["engine.max_running=4000", "model.max_context=4096"]), SMALL, trains=False)
    assert words.startswith(
        "This machine has 8.0 GB of memory, and the parts of the run are estimated to take 32.1 GB at most: 31.2 GB for keys"
    )
    assert "Lower engine.max_running; lower engine.prefix_mb; end what else takes memory; or give it more." in words
    assert "engine.count" not in words, "there is one"
    assert "machine" not in memory_words(load_config(DEMO, ["cluster.kind=ray"]), SMALL, trains=True), "an engine is on one of many"
