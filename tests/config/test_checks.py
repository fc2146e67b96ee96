"""Options that contradict each other, and options that surprise."""

from __future__ import annotations

import pytest

from midflight.config import load_config
from midflight.config.loss import loss_of
from midflight.config.notes import notes
from midflight.config.run import RunSection
from midflight.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.buffer_groups=15"], "rollout.buffer_groups (15) is less than the 16 groups of one step"),
        (["rollout.max_in_flight=7"], "rollout.max_in_flight (7) is less than rollout.group_size (8)"),
        (["gateway.shards=3"], "rollout.groups_per_step (16) can't be shared out equally by gateway.shards (3)"),
        (
            ["gateway.shards=2", "rollout.max_in_flight=15"],
            "rollout.max_in_flight (15) leaves no group of 8 for each of gateway.shards (2)",
        ),
        (["gateway.shards=16"], "gateway.shards is 16, and more than 11 stores can't be read as one"),
        (["gateway.shards=2", "environment.entry=midflight.environments.claimed:claimed"], "rollouts that are claimed go to one gateway"),
        (
            ["run.keep_trajectories=30 days"],
            "run.keep_trajectories is '30 days'; write 'all', a time such as '12h' or '30d', or a size such",
        ),
        (["run.keep_trajectories=0GB"], "run.keep_trajectories is '0GB'; write 'all'"),
        (["rollout.min_group_size=9"], "rollout.min_group_size (9) is more than rollout.group_size (8)"),
        (
            ["weights.every=6"],
            "weights.every (6) leaves the last step before a publication tokens that are 5 versions old, and rollout.max_staleness is 4",
        ),
        (["environment.top_p=0.9", "correction.sampling_masks=false"], "leave nothing to train with correction.sampling_masks = false"),
        (["environment.top_k=5", "distillation.teacher=x"], "leave nothing to train with distillation.teacher"),
        (["environment.top_p=0.9", "engine.kind=vllm"], 'which engine.kind = "vllm" does not say; remove them'),
        (["weights.every=2", "rollout.max_staleness=0"], "lower weights.every to at most 1"),
        (["model.num_heads=3"], "model.num_heads (3) must divide model.hidden_size (128)"),
        (["model.num_heads=128", "model.num_kv_heads=2"], "must be even"),
        (["model.num_kv_heads=3"], "model.num_kv_heads (3) must divide model.num_heads (4)"),
        (["environment.max_tokens=256"], "environment.max_tokens (256) must be less than model.max_context (256)"),
        (["objective.kind=ppo", "correction.weight=tis"], "would count the ratio to the behaviour policy twice"),
        (["objective.kind=ppo", "correction.cap=3"], 'correction.cap (3) does nothing with the weight "off"'),
        (
            ["objective.tau=0.1"],
            'objective.tau (0.1) does nothing with objective.kind = "decoupled_ppo"; remove it, or choose one of mirror_descent',
        ),
        (["correction.weight=off", "correction.self_normalised=true"], "does nothing without a weight"),
        (["correction.veto_low=2", "correction.veto_high=1"], "must be less than its upper bound"),
        (["correction.weight=mis", "correction.high=0.4"], "correction.low (0.5) must be less than its upper bound (0.4)"),
        (["correction.weight=icepop", "correction.low=6"], "correction.low (6) must be less than its upper bound (5)"),
        (["objective.kind=gmpo", "objective.reduction=token_mean"], "is a mean over each rollout"),
        (["objective.kind=mirror_descent"], "is derived for reward - mean"),
        (
            ["objective.kind=mirror_descent", "objective.advantage=dr_grpo", "objective.behaviour_coefficient=0.1"],
            "adds what mirror_descent has already",
        ),
        (["objective.kind=clip_cov", "objective.cov_low=5", "objective.cov_high=1"], "objective.cov_low (5) must be less than"),
        (["objective.advantage=maxrl", "objective.overlong_buffer=4"], "may make a reward negative"),
        (["correction.product_low=2", "correction.product_high=1"], "must be less than its upper bound"),
        (["objective.kind=cispo", "objective.proximal=interpolated"], "has no proximal policy"),
        (["objective.normalise=component", "objective.advantage=rloo"], "compares each component as GRPO does"),
        (["trainer.compute_dtype=bfloat16", "model.dtype=bfloat16"], "is for full-precision weights"),
        (["distillation.teacher=x", "objective.kind=gmpo"], "takes one advantage for a whole rollout"),
        (["distillation.teacher=x", "correction.opsm=0.1"], "goes by the sign of a whole rollout's advantage"),
        (
            ["model.path=some/folder", "distillation.teacher=some/other/../folder", "distillation.rewards=false"],
            "distillation.teacher (some/other/../folder) is the model that the run begins with",
        ),
        (["objective.overlong_buffer=17"], "objective.overlong_buffer (17)"),
        (["lora.alpha=8"], "lora.alpha does nothing without lora.rank"),
        (['lora.targets=["q_proj"]'], "lora.targets does nothing without lora.rank"),
        (["lora.rank=0"], "lora.rank must be >= 1"),
        (["engine.device=gpu"], "engine.device must be 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
        (["environment.entry=answer"], "environment.entry must be 'module:function', got 'answer'"),
        (["environment.sources=[]"], "environment.sources is empty"),
        (["environment.sources.0.path=x.jsonl"], "environment.sources.0 has dataset and path; give it exactly one of"),
        (["environment.sources=[{size=3}]"], "environment.sources.0 says nothing of where its tasks are from"),
        (["environment.sources=[{entry='rows'}]"], "environment.sources.0.entry must be 'module:function', got 'rows'"),
        (["environment.sources.0.answer=a"], "environment.sources.0.answer (a) has no meaning for a source with dataset; remove it"),
        (
            ["environment.sources.0.heldout=0.1"],
            "environment.sources.0.heldout (0.1) has no meaning for a source with dataset; give a number",
        ),
        (["environment.sources=[{path='x.jsonl', options={a=1}}]"], "environment.sources.0.options ({'a': 1}) has no meaning"),
        (["environment.sources=[{posted=true, size=3}]"], "environment.sources.0.size (3) has no meaning for a source with posted"),
        (["environment.sources=[{path='x.jsonl', prompt=''}]"], "environment.sources.0.prompt is empty"),
        (["environment.sources=[{path='a/x.jsonl'}, {path='b/x.csv'}]"], "environment.sources 0 and 1 are both called 'x'"),
        (["environment.sources=[{posted=true}, {posted=true, name='p'}]"], "more than one posted source"),
        (
            ["environment.sources=[{path='x.jsonl'}]", "warm_start.target_accuracy=0.5"],
            "which has none; set environment.sources.0.heldout, or warm_start.data",
        ),
        (['engine.urls=["http://a:1"]'], 'engine.kind is "embedded", which is started here'),
        (["engine.python=/x"], "engine.python (/x) is for a server that is started here"),
        (['engine.arguments=["--x"]'], "engine.arguments (--x) are for a server that is started here"),
        (["engine.kind=vllm", 'engine.urls=["http://a:1"]', 'engine.arguments=["--x"]'], "engine.arguments (--x) are for a server"),
        (["engine.kind=sglang", "model.dtype=float64"], 'engine.kind = "sglang" cannot serve float64'),
        (["engine.deterministic=true"], "the embedded engine samples by seed and position already"),
        (["engine.kind=vllm", "engine.deterministic=true"], "vLLM has such kernels for GPUs alone, and engine.device is cpu"),
        (["engine.kind=sglang", "engine.deterministic=true"], "SGLang has such kernels for GPUs alone, and engine.device is cpu"),
        (
            ["engine.kind=vllm", "engine.deterministic=true", 'engine.urls=["http://a:1"]'],
            "does not say whether it was started with VLLM_BATCH",
        ),
        (["engine.kind=vllm", 'engine.urls=["a:1"]'], "engine.urls must be addresses such as http://127.0.0.1:30000, got 'a:1'"),
        (["engine.kind=vllm", 'engine.urls=["http://a:1/v1"]'], "got 'http://a:1/v1'"),
        (["engine.kind=vllm", 'engine.urls=["http://a:1", "http://a:1"]'], "engine.urls names a server twice"),
        (["engine.kind=vllm", 'engine.urls=["http://a:1"]', "engine.count=2"], "engine.count (2) is not the number of engine.urls (1)"),
        (["gateway.port=70000"], "gateway.port must be >= 0 and <= 65535, got 70000"),
    ],
)
def test_a_contradiction_is_refused_with_both_values(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=r".") as caught:
        load_config(None, overrides)
    assert expected in str(caught.value)


def test_the_values_at_the_edge_are_allowed() -> None:
    load_config(None, ["rollout.buffer_groups=16", "rollout.max_in_flight=8", "rollout.min_group_size=8", "environment.max_tokens=255"])


def test_servers_are_configured_by_kind_and_place() -> None:
    started = load_config(None, ["engine.kind=vllm", "engine.python=/x/python", 'engine.arguments=["--a", "b"]', "engine.count=2"]).engine
    assert started.arguments == ("--a", "b")
    attached = load_config(None, ["engine.kind=sglang", 'engine.urls=["http://a:1", "https://b"]']).engine
    assert attached.urls == ("http://a:1", "https://b")
    load_config(None, ["model.dtype=float64", "engine.kind=vllm", "engine.dtype=float32"])


def test_a_list_of_texts_is_asked_for_where_something_else_is_given() -> None:
    with pytest.raises(ConfigError, match=r"engine\.arguments must be a list of texts, got '--x'"):
        load_config(None, ["engine.kind=vllm", "engine.arguments=--x"])
    with pytest.raises(ConfigError, match=r"engine\.urls must be a list of texts, got \[1\]"):
        load_config(None, ["engine.kind=vllm", "engine.urls=[1]"])


def test_serving_in_another_precision_than_training_is_announced() -> None:
    assert any("serve in bfloat16 what is trained in float32" in note for note in notes(load_config(None, ["engine.dtype=bfloat16"])))
    assert not any("serve in" in note for note in notes(load_config(None)))


def test_training_in_numbers_that_lie_farther_apart_than_its_steps_is_announced() -> None:
    """Above 2**-7 = 0.0078 the numbers of bfloat16 lie at least 2**-14 = 6.1e-5 apart, and adding less than half of that, 3.05e-5, changes none."""
    given = ["model.dtype=bfloat16", "trainer.learning_rate=3e-5"]
    (note,) = [note for note in notes(load_config(None, given)) if "3e-05" in note]
    assert "leave weights above 0.0078 as they are" in note and 'engine.dtype = "bfloat16"' in note
    assert not any("as they are" in note for note in notes(load_config(None, ["engine.dtype=bfloat16"])))


def test_the_model_before_training_may_be_the_teacher_where_something_else_moves_the_student() -> None:
    same = ["model.path=some/folder", "distillation.teacher=some/folder"]
    load_config(None, same)
    load_config(None, [*same, "distillation.rewards=false", "warm_start.target_accuracy=0.5"])


def test_a_bypass_objective_has_no_weight_by_default_and_a_decoupled_one_tis() -> None:
    bypass, decoupled = (load_config(None, given) for given in (["objective.kind=ppo"], []))
    assert loss_of(bypass.objective, bypass.correction).weight == "off"
    assert loss_of(decoupled.objective, decoupled.correction).bounds == {"cap": 2.0}


def test_a_model_folder_brings_its_own_heads() -> None:
    load_config(None, ["model.path=some/folder", "model.num_heads=3"])


def test_the_synchronous_loop_is_announced() -> None:
    assert any("synchronous loop" in note for note in notes(load_config(None, ["rollout.max_staleness=0"])))
    assert not any("synchronous loop" in note for note in notes(load_config(None)))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.group_size=1", "every advantage is 0"),
        ("rollout.stale_policy=mask", "biased"),
        ("rollout.stale_policy=drop", "shortens"),
        ("rollout.max_in_flight=64", "a step waits for several waves"),
        ("rollout.max_in_flight=65", "64 engine slots"),
    ],
)
def test_a_surprise_gets_a_note(override: str, expected: str) -> None:
    assert any(expected in note for note in notes(load_config(None, [override])))


@pytest.mark.parametrize(
    ("kept", "bounds"),
    [("all", None), ("12h", (None, 43_200)), ("30d", (None, 2_592_000)), ("500GB", (500 * 1024**3, None)), ("2TB", (2 * 1024**4, None))],
)
def test_trajectories_are_kept_by_age_or_by_size(kept: str, bounds: tuple[int | None, int | None] | None) -> None:
    assert RunSection(keep_trajectories=kept).kept_trajectories == bounds
