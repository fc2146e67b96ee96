"""What follows from the numbers, worked out here for B = 16, n = 8, S = 4 unless said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.config.folders import SIZES, folder_of_model

from midflight.config import context, derived, load_config
from midflight.config.derived import computing_threads, core_note, model_sizes, placement
from midflight.config.disk import disk_bytes, first_disk_bytes, published_bytes, spilled_bytes, staged_bytes
from midflight.config.knobs import Knob, admission_limit, knobs
from midflight.config.loss_text import effective_loss
from midflight.config.memory import LOGITS_AT_ONCE, activation_bytes, batch_tokens, longest_row, memory_estimate, total_bytes
from midflight.config.notes import notes
from midflight.errors import ModelNotFound
from midflight.models.sizes import ModelSizes
from midflight.run.rollout.system import buffer_limits
from midflight.trainer.model.scores import CHUNK


def knob(name: str, *overrides: str) -> Knob:
    return next(k for k in knobs(load_config(None, overrides)) if k.name.endswith(name))


def test_the_defaults_follow_from_batch_and_bound() -> None:
    rollout = load_config(None).rollout
    assert derived.most_in_flight(rollout) == 5 * 16 * 8
    assert derived.in_flight(load_config(None)) == 64 + 7, "as many as an engine decodes together, and the rest of a group"
    assert derived.in_flight(load_config(None, ["engine.count=3"])) == 3 * 64 + 7
    assert derived.in_flight(load_config(None, ["engine.count=30"])) == 5 * 16 * 8
    assert derived.buffer_groups(rollout) == 5 * 16
    assert derived.min_group_size(rollout) == 4
    assert derived.min_group_size(load_config(None, ["rollout.group_size=5"]).rollout) == 3


@pytest.mark.parametrize("group_size", [1, 4, 5])
def test_the_buffer_works_with_the_numbers_that_are_shown(group_size: int) -> None:
    rollout = load_config(None, [f"rollout.group_size={group_size}"]).rollout
    limits = buffer_limits(rollout)
    assert limits.max_in_flight == derived.most_in_flight(rollout)
    assert limits.buffer_groups == derived.buffer_groups(rollout)
    assert limits.min_group_size == derived.min_group_size(rollout)


def test_what_is_set_wins_over_what_follows() -> None:
    config = load_config(None, ["rollout.max_in_flight=100", "rollout.buffer_groups=20", "rollout.min_group_size=2"])
    rollout = config.rollout
    assert (derived.in_flight(config), derived.buffer_groups(rollout), derived.min_group_size(rollout)) == (100, 20, 2)


def test_admission_grows_by_one_batch_with_every_served_version() -> None:
    rollout = load_config(None).rollout
    assert [admission_limit(rollout, served) for served in (0, 1, 7)] == [80, 96, 192]
    synchronous = load_config(None, ["rollout.max_staleness=0"]).rollout
    assert admission_limit(synchronous, 0) == 16


@pytest.mark.parametrize("policy", ["wait", "drop", "mask", "requeue"])
def test_i2_every_policy_has_the_bound_as_its_worst_case_and_a_price_of_its_own(policy: str) -> None:
    stale = derived.worst_staleness(load_config(None, [f"rollout.stale_policy={policy}"]).rollout)
    others = {
        derived.worst_staleness(load_config(None, [f"rollout.stale_policy={p}"]).rollout).price for p in ("wait", "drop") if p != policy
    }
    assert stale.worst == 4
    assert stale.price not in others
    synchronous = load_config(None, [f"rollout.stale_policy={policy}", "rollout.max_staleness=0"]).rollout
    assert (derived.worst_staleness(synchronous).worst, derived.worst_staleness(synchronous).price[:4]) == (0, "none")


def test_the_tighter_of_two_knobs_binds_and_a_tie_binds_both() -> None:
    assert knob("max_in_flight", "rollout.max_in_flight=256").binds
    assert not knob("max_staleness", "rollout.max_in_flight=256").binds
    assert knob("max_staleness", "rollout.max_in_flight=1000").binds
    assert not knob("max_in_flight", "rollout.max_in_flight=1000").binds
    assert knob("max_in_flight").binds and not knob("max_staleness").binds
    assert knob("max_in_flight", "engine.count=10").binds and knob("max_staleness", "engine.count=10").binds


def test_a_buffer_smaller_than_what_admission_lets_in_binds() -> None:
    assert knob("buffer_groups", "rollout.buffer_groups=79").binds
    assert not knob("buffer_groups", "rollout.buffer_groups=80").binds


def test_there_are_six_knobs() -> None:
    assert len(knobs(load_config(None))) == 6


def test_memory_of_a_made_model_is_what_its_sizes_say() -> None:
    config = load_config(
        None, ["model.hidden_size=8", "model.intermediate_size=16", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=1"]
    )
    sizes = model_sizes(config.model)
    embedding, attention, feed_forward, norms = 262 * 8, 2 * 8 * 4 * (2 + 1), 3 * 8 * 16, 2 * 8 + 2 * 4
    assert sizes.num_parameters == embedding + attention + feed_forward + norms + 8
    items = {(item.where, item.what.split(":")[0].split(",")[0]): item.num_bytes for item in memory_estimate(config, sizes)}
    assert items["trainer", "weights"] == 4 * 4 * sizes.num_parameters
    # 64 slots of 256 tokens, keys and values of one head of 4 numbers of 4 bytes
    assert items["engines", "keys and values"] == 64 * 256 * 2 * 4 * 4
    # one version that is live, one whose handover is under way, one that waits for it
    assert items["shared memory", "published versions"] == 3 * 4 * sizes.num_parameters


def test_memory_grows_with_slots_and_engines() -> None:
    def total(*overrides: str) -> int:
        config = load_config(None, overrides)
        return total_bytes(memory_estimate(config, model_sizes(config.model)))

    assert total() < total("engine.max_running=128") < total("engine.max_running=128", "engine.count=2")


def test_weights_in_engines_and_on_their_way_take_what_the_served_precision_takes() -> None:
    def items(*overrides: str) -> dict[str, int]:
        config = load_config(None, overrides)
        return {f"{item.where} {item.what[:9]}": item.num_bytes for item in memory_estimate(config, model_sizes(config.model))}

    exact, coarse = items(), items("engine.dtype=bfloat16")
    for name in ("engines weights, ", "engines keys and ", "shared memory published"):
        assert coarse[name] * 2 == exact[name]
    assert coarse["trainer weights, "] == exact["trainer weights, "]
    assert derived.served_dtype(load_config(None, ["model.dtype=bfloat16"])) == "bfloat16"


def copies_of_weights(where: str, *overrides: str) -> float:
    config = load_config(None, overrides)
    sizes = model_sizes(config.model)
    items = [i for i in memory_estimate(config, sizes) if i.where == where and ("weights" in i.what or "version" in i.what)]
    return sum(item.num_bytes for item in items) / sizes.weight_bytes(config.model.dtype)


def test_memory_counts_a_server_that_is_started_and_of_one_that_runs_already_only_what_is_staged_for_it() -> None:
    urls = ["engine.kind=vllm", 'engine.urls=["http://a:1", "http://b:1"]']
    assert copies_of_weights("engines") == 2, "live and staged"
    assert copies_of_weights("engines", "engine.kind=vllm") == 4, "its own, two folders, and what is being fetched"
    assert copies_of_weights("engines", *urls) == 2 * 3
    config = load_config(None, urls)
    assert [i.num_bytes for i in memory_estimate(config, model_sizes(config.model)) if "keys and values" in i.what] == [0]


def test_shared_memory_is_asked_for_where_versions_pass_it() -> None:
    def shared(*overrides: str) -> tuple[int, int]:
        made = load_config(None, ["engine.count=2", "model.dtype=float32", *overrides])
        sizes = model_sizes(made.model)
        weights = sizes.weight_bytes("float32")
        return published_bytes(made, sizes) // weights, staged_bytes(made, sizes) // weights

    assert shared() == (3, 0), "three versions"
    assert shared("weights.delta=true") == (4, 0)
    assert shared("engine.kind=vllm") == (3, 2 * 2), "and two folders for each server"
    assert shared("engine.kind=vllm", "weights.transport=pull") == (0, 2 * 2)
    assert shared("engine.kind=vllm", "weights.transport=direct") == (0, 0)
    assert shared("engine.kind=vllm", "weights.transport=direct", "lora.rank=8", "lora.merged=true") == (0, 2 * 2)


def test_versions_for_which_shared_memory_has_no_room_beside_what_servers_load_are_counted_on_the_disk() -> None:
    made = load_config(None, ["engine.kind=vllm", "model.dtype=float32"])
    sizes = model_sizes(made.model)
    weights = sizes.weight_bytes("float32")
    assert spilled_bytes(made, sizes, shared_free=5 * weights) == 0, "three versions, and two folders of one server"
    assert spilled_bytes(made, sizes, shared_free=5 * weights - 1) == 3 * weights
    pulled = load_config(None, ["engine.kind=vllm", "model.dtype=float32", "weights.transport=pull"])
    assert spilled_bytes(pulled, sizes, shared_free=0) == 0
    there, small = (first_disk_bytes(made, sizes, trains=True, shared_free=free) for free in (5 * weights, 0))
    assert small - there == 3 * weights
    assert disk_bytes(made, sizes) == disk_bytes(pulled, sizes)


def test_memory_of_activations_grows_with_ranks_and_not_with_a_vocabulary_beyond_what_is_made_at_a_time() -> None:
    def activations(vocab_size: int, *overrides: str) -> int:
        config = load_config(None, overrides)
        sizes = replace(model_sizes(config.model), vocab_size=vocab_size)
        return sum(item.num_bytes for item in memory_estimate(config, sizes) if "activations" in item.what)

    hidden = load_config(None).model.hidden_size
    assert activations(262) < activations(10_000)
    assert activations(150_000) - activations(10_000) == 140_000 * hidden * 4, (
        "the output layer's gradient, before it is added to the others"
    )
    assert LOGITS_AT_ONCE == CHUNK, "the trainer's, which needs torch"
    assert 2 * activations(262, "trainer.compute_dtype=bfloat16") == activations(262, "trainer.ranks=2")


def test_rows_of_one_turn_are_as_long_as_the_longest_prompt_and_its_answer() -> None:
    """8 groups of 8 with prompts of at most 46 tokens and answers of 20: a batch has 8 prompts and 64 answers."""
    config = load_config(None, ["rollout.groups_per_step=8", "environment.max_tokens=20", "model.max_context=2112"])
    assert (longest_row(config, 46), longest_row(config, None), longest_row(config, 5000)) == (66, 2112, 2112)
    assert batch_tokens(config, 46) == 8 * 46 + 64 * 20
    assert batch_tokens(config, None) == 64 * 2112
    several = load_config(None, ["environment.entry=my:agent", "environment.max_tokens=20"])
    assert longest_row(several, 46) == several.model.max_context, "an agent may ask more than once"


def test_what_is_kept_for_the_backward_pass_is_what_the_layers_keep() -> None:
    """SmolLM2's: 576 wide, 9 heads of 64 over 3, feed-forward of 1536."""
    sizes = ModelSizes(49152, 576, 1536, 30, 9, 3, 64, 8192)
    kept = 6 * 576 + (5 * 9 + 6 * 3) * 64 + 4 * 1536
    outputs = (9 + 2 * 3) * 64 + 576 + 2 * 1536 + 576  # of queries, keys and values, out, gate and up, down
    logits, table = 4 * 2**24, 49152 * 576

    def taken(*overrides: str) -> int:
        return activation_bytes(load_config(None, overrides), sizes, 1000)

    assert taken() == taken("trainer.compute_dtype=bfloat16") == 4 * (1000 * 31 * kept + logits + table)
    assert taken("trainer.activation_checkpointing=true") == 4 * (1000 * (30 * 576 + kept) + logits + table)
    # Logits, and the gradient of their table, are in float32 all the same.
    assert taken("model.dtype=bfloat16") == 2 * 1000 * 31 * kept + 4 * (logits + table)
    assert taken("lora.rank=16") == 4 * (1000 * 31 * (kept + outputs) + logits + table)


@pytest.mark.parametrize("every", [0, 10])
def test_a_checkpoint_is_counted_beside_the_memory_of_activations_which_malloc_keeps(every: int) -> None:
    config = load_config(None, ["run.steps=100", f"trainer.checkpoint_every={every}"])
    sizes = model_sizes(config.model)
    (item,) = (item for item in memory_estimate(config, sizes) if "a checkpoint" in item.what)
    assert item.least_bytes == item.num_bytes == 3 * sizes.weight_bytes("float32")


def test_activations_are_of_one_short_group_that_differs_at_least() -> None:
    def found(*overrides: str) -> tuple[int, int, int]:
        """The least and the most of the estimate, and activations of so many tokens as a group has answers."""
        config = load_config(None, ["run.steps=100", *overrides])
        sizes = model_sizes(config.model)
        (item,) = (item for item in memory_estimate(config, sizes) if "activations" in item.what)
        return item.least_bytes, item.num_bytes, activation_bytes(config, sizes, config.rollout.group_size)

    least, most, of_a_group = found()
    assert least == of_a_group < most
    least, most, of_a_group = found("objective.entropy_coefficient=0.01")
    assert of_a_group < least < most, "every row has a backward pass"
    least, most, of_a_group = found("trainer.micro_batch_tokens=4")
    assert least == most < of_a_group


def test_memory_counts_what_ranks_gather_of_each_other() -> None:
    """Four times the table and two layers, on each of them; one rank gathers nothing."""

    def gathered(ranks: int) -> list[int]:
        config = load_config(None, [f"trainer.ranks={ranks}"])
        return [item.num_bytes for item in memory_estimate(config, model_sizes(config.model)) if "gathers" in item.what]

    sizes = model_sizes(load_config(None).model)
    numbers = sizes.vocab_size * sizes.hidden_size + 2 * sizes.num_layer_parameters
    assert gathered(1) == [] and gathered(2) == [2 * 4 * 4 * numbers]


def test_memory_counts_the_reference_that_a_divergence_is_taken_from() -> None:
    assert copies_of_weights("trainer", "objective.kl_coefficient=0.1") == copies_of_weights("trainer") + 1


def test_memory_counts_adapters_where_they_alone_are_trained_and_handed_over() -> None:
    assert 1 < copies_of_weights("trainer", "lora.rank=4") < 1.3, "without a warm start there are no gradients of the base"
    assert 4 < copies_of_weights("trainer", "lora.rank=4", "warm_start.target_accuracy=0.5") < 4.1
    assert 0 < copies_of_weights("shared memory", "lora.rank=4") < 0.3
    assert 1 < copies_of_weights("engines", "lora.rank=4") < 1.1
    assert copies_of_weights("engines", "lora.rank=4", "engine.kind=vllm", "lora.merged=true") == 5
    one = copies_of_weights("engines", "lora.rank=4") - 1
    kept = copies_of_weights(
        "engines", "lora.rank=4", "engine.kind=vllm"
    )  # the base; six versions in files and in memory, and one that comes
    assert kept == pytest.approx(1 + (6 + 6 + 1) * one)


def test_memory_counts_what_differences_and_a_served_precision_take() -> None:
    assert copies_of_weights("shared memory", "weights.delta=true") == 4
    assert copies_of_weights("engines", "weights.delta=true", "engine.count=2") == 2 * 3
    assert copies_of_weights("trainer") == 4
    assert copies_of_weights("trainer", "weights.delta=true") == 5
    assert copies_of_weights("trainer", "weights.delta=true", "engine.dtype=bfloat16") == 4 + 2 / 2


def test_memory_counts_the_processes_of_servers() -> None:
    def processes(*overrides: str) -> int:
        config = load_config(None, overrides)
        return sum(item.num_bytes for item in memory_estimate(config, model_sizes(config.model)) if "the process" in item.what)

    attached = ["engine.kind=vllm", 'engine.urls=["http://a:1", "http://b:1"]']
    assert processes(*attached) < processes() < processes("engine.kind=vllm")


def test_memory_of_processes_goes_by_what_they_import() -> None:
    """reasoning-gym where tasks are drawn from a dataset; the SDK for agents that get a client, and not for the built-in loop. Measured, with two
    workers: 162 and 89 MB of the rollout process, 144 and 94 MB of the workers."""

    def of(where: str, *overrides: str) -> float:
        config = load_config(None, overrides)
        items = memory_estimate(config, model_sizes(config.model))
        return sum(item.num_bytes for item in items if item.where == where and "the process" in item.what) / 1e6

    rewards = 'environment.rewards=[{entry="midflight.rewards:number_match"}]'
    rows = "environment.sources=[{path='x.jsonl'}]"
    assert of("rollout") - of("rollout", rows) == pytest.approx(162 - 89, rel=0.15)
    assert of("rollout", rows) == pytest.approx(89, rel=0.15)
    assert of("workers", rewards, "environment.workers=2") == pytest.approx(94, rel=0.15)
    assert of("workers", "environment.entry=a:b", "environment.workers=2") == pytest.approx(144, rel=0.15)


def test_every_url_is_an_engine() -> None:
    config = load_config(
        None, ["engine.kind=sglang", 'engine.urls=["http://a:1", "http://b:1"]', "engine.max_running=8", "trainer.threads=2"]
    )
    assert derived.num_engines(config.engine) == 2 and derived.engine_slots(config) == 16
    (engine,) = [place for place in placement(config) if place.process == "engine"]
    assert (engine.count, engine.device) == (2, "theirs") and "running sglang server" in engine.task
    assert computing_threads(config) == 2, "their threads are not of our cores"


def test_the_interpreter_of_a_server_is_where_it_is_installed_unless_it_is_named() -> None:
    assert derived.engine_python(load_config(None, ["engine.kind=vllm"]).engine) == Path(".venv-vllm/bin/python")
    assert derived.engine_python(load_config(None, ["engine.kind=sglang"]).engine) == Path(".venv-sglang/bin/python")
    assert derived.engine_python(load_config(None, ["engine.kind=sglang", "engine.python=/x/python"]).engine) == Path("/x/python")


def test_a_missing_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        model_sizes(load_config(None, [f"model.path={tmp_path}/nowhere"]).model)


def test_placement_counts_processes_and_warns_when_threads_exceed_cores() -> None:
    config = load_config(None, ["engine.count=2", "engine.threads=2", "trainer.threads=3"])
    assert {p.process: p.count for p in placement(config)} == {"launcher": 1, "rollout": 1, "engine": 2, "trainer": 1}
    assert computing_threads(config) == 2 * 2 + 3
    assert core_note(config, 7) is None
    assert "7 threads on 6 cores" in (core_note(config, 6) or "")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [],
            "sg[min(ρ, 2)] * (-min(r A, clip(r, 0.8, 1.28) A))\nρ = sg[π] / µ,  r = π / sg[π]: one update per step, so r is 1 and no clip acts",
        ),
        (["trainer.updates_per_step=2"], "ρ = π_prox / µ,  r = π / π_prox,  π_prox from the start of the step"),
        (["objective.kind=ppo"], "-min(R A, clip(R, 0.8, 1.28) A)"),
        (["correction.self_normalised=true", "correction.age_decay=0.9"], "loss = sg[min(ρ, 2)] / mean over the batch * 0.9^age * ("),
        (["objective.kind=ppo", "objective.dual_clip=3"], ", at most -3 A where A < 0"),
        (["objective.kind=ppo"], "R = π / µ: the ratio to the behaviour policy, no further weight"),
        (["correction.veto_low=1e-4"], "masked unless every ρ of the rollout within [0.0001, inf]"),
        (["objective.kl_coefficient=0.1"], "loss += 0.1 (x - 1 - log x)"),
        (["objective.advantage=dr_grpo"], "A = reward - mean of group"),
        (["objective.reduction=constant"], "/ (rollouts * 16)"),
        (["objective.overlong_buffer=4"], "(1 - room / 4) where an answer left room for less than 4 tokens"),
    ],
)
def test_the_loss_is_printed_as_what_it_is(overrides: list[str], expected: str) -> None:
    assert expected in "\n".join(effective_loss(load_config(None, overrides)))


def test_the_context_is_the_folders_own_unless_it_is_given(tmp_path: Path) -> None:
    path = folder_of_model(tmp_path)
    assert load_config(None, [f"model.path={path}"]).model.max_context == 4096
    assert load_config(None, [f"model.path={path}", "model.max_context=300"]).model.max_context == 300
    assert load_config(None, []).model.max_context == load_config(None, [f"model.path={tmp_path}/nowhere"]).model.max_context == 256
    nested = folder_of_model(tmp_path, text_config={**SIZES, "max_position_embeddings": 512})
    assert load_config(None, [f"model.path={nested}"]).model.max_context == 512
    assert load_config(None, [f"model.path={folder_of_model(tmp_path, max_position_embeddings=128)}"]).model.max_context == 128


def test_the_context_is_bounded_by_memory_which_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder_of_model(tmp_path)
    # Keys and values: 2 layers x 2 x 1 head x 4 numbers x 4 bytes = 64 bytes a token, in 64 slots 4096; an eighth of 32 MB has 1024 of them.
    monkeypatch.setattr(context, "machine_bytes", lambda: 32 * 2**20)
    config = load_config(None, [f"model.path={path}"])
    assert config.model.max_context == 1024 and any("1,024 of the 4,096 tokens" in note for note in notes(config))
    # In 48 slots they are 3072 bytes, of which 4 MB have 1365: 21 x 64 are taken.
    assert load_config(None, [f"model.path={path}", "engine.max_running=48"]).model.max_context == 1344
    # Activations: 4 bytes x (2 + 1) layers x (6 x 8 + 16 x 4 + 4 x 16) = 2112 bytes a token; 4 MB have 1985, of which 31 x 64 are taken.
    assert load_config(None, [f"model.path={path}", "engine.max_running=1"]).model.max_context == 1984
    # On GPUs the machine's memory stands for theirs, of which a quarter has twice as many.
    assert load_config(None, [f"model.path={path}", "engine.device=cuda", "trainer.device=cuda"]).model.max_context == 2048
    assert not any(
        "tokens that the model can" in note for note in notes(load_config(None, [f"model.path={path}", "model.max_context=300"]))
    )


@pytest.mark.parametrize(
    ("overrides", "trainer_is_ours", "expected"),
    [
        ([], True, True),
        ([], False, False),
        (["correction.sampling_masks=true"], False, True),
        (["correction.sampling_masks=false"], True, False),
        (["distillation.teacher=x", "correction.sampling_masks=true"], True, False),
    ],
)
def test_truncated_turns_are_trained_by_our_trainer_and_by_another_if_it_is_asked(
    overrides: list[str], trainer_is_ours: bool, expected: bool
) -> None:
    assert derived.trains_truncated(load_config(None, overrides), trainer_is_ours=trainer_is_ours) is expected
