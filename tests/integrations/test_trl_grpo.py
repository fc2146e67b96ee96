"""trl's `GRPOConfig` and `GRPOTrainer`, without trl: what each option becomes, and what is refused before anything is touched."""

from __future__ import annotations

import inspect
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integrations.test_trl import ROWS, model, reward

from midflight import given
from midflight.config.agents import RewardSection
from midflight.entries import load_entry
from midflight.environments.reward_functions import RewardFunction
from midflight.errors import ConfigError
from midflight.integrations.trl import (
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)
from midflight.integrations.trl.metrics import grpo_metrics
from midflight.integrations.trl.reward_functions import taking_completions
from midflight.integrations.trl.rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)
from midflight.observe.lines import EvaluationLine, StepLine
from midflight.observe.status import Totals

__all__ = ["model"]
TRAINER = [
    "model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class", "reward_processing_classes", "callbacks", "optimizers",
    "quantization_config", "peft_config", "tools", "rollout_func", "environment_factory",
]  # fmt: skip
"""The arguments of trl 1.16.0's trainer, in their order."""


def tables(model: str, *, num_rows: int = 20, **options: Any) -> dict[str, dict[str, Any]]:
    return GRPOConfig("runs/mine", use_cpu=True, **options).tables(model=model, num_rows=num_rows)


def test_the_trainer_has_the_arguments_of_trl_in_their_order() -> None:
    assert list(inspect.signature(GRPOTrainer.__init__).parameters)[1:] == TRAINER


# --- What defaults mean ----------------------------------------------------------------------------------------------


def test_defaults_are_trls_synchronous_loop_with_dapos_loss_and_no_reference(model: str) -> None:
    found = tables(model)
    assert found["objective"] == {
        "kind": "decoupled_ppo", "reduction": "token_mean", "advantage": "grpo", "kl": "unbiased", "kl_coefficient": 0.0, "entropy_coefficient": 0.0,
        "mask_truncated": False, "clip_low": 0.2, "clip_high": 0.2,
    }  # fmt: skip
    assert found["correction"] == {"weight": "off"} and found["evaluation"] == {}
    assert found["rollout"] == {"groups_per_step": 1, "group_size": 8, "max_staleness": 0}
    trainer = found["trainer"]
    assert (trainer["learning_rate"], trainer["schedule"], trainer["warmup_steps"], trainer["adam_beta2"]) == (1e-6, "linear", 0, 0.999)
    assert (trainer["updates_per_step"], trainer["epochs_per_step"], trainer["checkpoint_every"]) == (1, 1, 500)
    assert found["run"]["steps"] == 60, "three epochs of 20 rows, one a step"
    assert found["environment"]["max_tokens"] == 127, "512, and the model's context holds 128"
    assert (found["environment"]["temperature"], found["environment"]["top_p"], found["environment"]["top_k"]) == (1.0, 1.0, None)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"loss_type": "grpo"}, {"kind": "decoupled_ppo", "reduction": "sequence_mean"}),
        ({"loss_type": "bnpo"}, {"kind": "decoupled_ppo", "reduction": "token_mean"}),
        ({"loss_type": "dr_grpo", "scale_rewards": False}, {"reduction": "constant", "advantage": "dr_grpo"}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"kind": "decoupled_cispo", "clip_low": 1.0, "clip_high": 4.0}),
        ({"loss_type": "sapo", "sapo_temperature_neg": 1.1}, {"kind": "sapo", "reduction": "sequence_mean", "tau_positive": 1.0, "tau_negative": 1.1}),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4},
         {"kind": "gspo", "reduction": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4}),
        ({"beta": 0.04}, {"kl_coefficient": 0.04, "kl": "unbiased"}),
        ({"beta": 0.04, "use_bias_correction_kl": False}, {"kl_coefficient": 0.04, "kl": "k3"}),
        ({"delta": 2.0}, {"dual_clip": 2.0}),
        ({"scale_rewards": "none"}, {"advantage": "dr_grpo"}),
        ({"scale_rewards": True}, {"advantage": "grpo"}),
        ({"scale_rewards": "batch"}, {"advantage": "reinforce_pp"}),
        ({"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"}, {"normalise": "component", "advantage": "grpo"}),
        ({"entropy_coef": 0.01}, {"entropy_coefficient": 0.01}),
        ({"mask_truncated_completions": True}, {"mask_truncated": True}),
    ],
)  # fmt: skip
def test_options_of_the_loss_have_their_counterparts(model: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    assert tables(model, **options)["objective"].items() >= expected.items()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"use_vllm": True}, {"weight": "mis_sequence", "low": 0.0, "high": 3.0}),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.5}, {"weight": "mis", "low": 0.5, "high": 3.0}),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_cap": 2.0}, {"weight": "tis", "cap": 2.0}),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate"}, {"weight": "tis_sequence", "cap": 3.0}),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, {"weight": "off"}),
        ({"max_staleness": 2}, {}),
        ({"off_policy_mask_threshold": 0.1}, {"weight": "off", "opsm": 0.1}),
    ],
)  # fmt: skip
def test_the_ratio_to_the_policy_that_sampled_is_corrected_as_trl_does(
    model: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert tables(model, **options)["correction"] == expected


def test_a_generation_batch_of_several_optimizer_steps_is_one_step_of_several_updates(model: str) -> None:
    config = GRPOConfig(
        use_cpu=True,
        per_device_train_batch_size=8,
        steps_per_generation=4,
        num_generations=4,
        num_iterations=3,
        max_steps=25,
        save_steps=30,
        warmup_steps=24,
    )
    found = config.tables(model=model, num_rows=None)
    assert found["rollout"]["groups_per_step"] == 8, "32 samples in groups of 4"
    assert (found["trainer"]["updates_per_step"], found["trainer"]["epochs_per_step"]) == (4, 3)
    assert (config.updates_per_step, found["run"]["steps"]) == (12, 3), "25 of trl's steps, 12 in one of ours"
    assert (found["trainer"]["checkpoint_every"], found["trainer"]["warmup_steps"]) == (3, 2)
    same = GRPOConfig(per_device_train_batch_size=8, generation_batch_size=32, num_generations=4)
    assert (same.groups_per_step, same.updates_per_step) == (8, 4)
    halves = GRPOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=4, steps_per_generation=2, num_generations=4)
    assert (halves.groups_per_step, halves.updates_per_step) == (8, 1), "two generations for one update are one step too"


def test_an_epoch_drops_what_does_not_fill_a_batch_as_trl_counts(model: str) -> None:
    config = GRPOConfig(per_device_train_batch_size=24, num_train_epochs=2)
    assert (config.groups_per_step, config.steps(20)) == (3, 12), "6 batches of 3 rows, and 2 rows left"
    with pytest.raises(ConfigError, match=r"the length of the data is not known: set max_steps in GRPOConfig"):
        config.steps(None)


def test_sampling_may_be_given_as_generation_kwargs_which_override(model: str) -> None:
    found = tables(
        model,
        top_p=0.9,
        temperature=0.5,
        generation_kwargs={"top_p": 0.8, "top_k": 5, "min_p": 0.1, "max_new_tokens": 32, "do_sample": True},
    )
    environment = found["environment"]
    assert (environment["top_p"], environment["top_k"], environment["min_p"]) == (0.8, 5, 0.1)
    assert (environment["temperature"], environment["max_tokens"]) == (0.5, 32)


def test_engines_are_ours_or_vllms_started_here_or_running(model: str) -> None:
    assert tables(model)["engine"] == {"device": "cpu"}
    server = tables(model, use_vllm=True, vllm_mode="server", vllm_server_port=9000, vllm_server_timeout=10)["engine"]
    assert server == {"device": "cpu", "kind": "vllm", "urls": ["http://127.0.0.1:9000"], "start_seconds": 10.0}
    named = tables(model, use_vllm=True, vllm_mode="server", vllm_server_base_url="http://other:1/")["engine"]
    assert named["urls"] == ["http://other:1"]
    beside = tables(model, use_vllm=True, vllm_tensor_parallel_size=2, vllm_model_impl="transformers", vllm_max_model_length=64)
    assert beside["engine"] == {
        "device": "cpu",
        "kind": "vllm",
        "arguments": ["--model-impl=transformers"],
        "servers": [{"tensor_parallel": 2}],
    }
    assert beside["model"]["max_context"] == 64


def test_evaluations_answer_each_held_out_row_as_often_as_trl_does(model: str) -> None:
    assert tables(model, eval_strategy="steps", eval_steps=5)["evaluation"] == {
        "eval_every": 5,
        "suites": [{"name": "samples", "samples": 8}],
    }
    assert tables(model, eval_strategy="epoch", num_generations_eval=1)["evaluation"] == {"eval_every": 20}
    assert tables(model, eval_strategy="steps", num_generations_eval=1)["evaluation"] == {"eval_every": 10}, "as logging_steps"


# --- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betta": 0.1}, r"GRPOConfig has no option 'betta'.*beta"),
        ({"beta": -0.1}, r"beta=-0\.1: .*set 0 or more"),
        ({"loss_type": "luspo"}, r"loss_type='luspo': it is dr_grpo with importance_sampling_level='sequence'"),
        ({"loss_type": "vespo"}, r"loss_type='vespo': it is a loss of your own"),
        ({"loss_type": "dppo"}, r"loss_type='dppo': losses are grpo, bnpo, dr_grpo, dapo, cispo, sapo"),
        ({"loss_type": "cispo"}, r"epsilon_high=0\.2 with loss_type='cispo': .*set epsilon_high=5\.0"),
        ({"delta": 1.1}, r"delta=1\.1: .*more than 1 \+ epsilon_high \(1\.2\)"),
        ({"delta": 2.0, "loss_type": "sapo"}, r"delta=2\.0 with loss_type='sapo'"),
        ({"importance_sampling_level": "word"}, r"importance_sampling_level='word': it is token or sequence"),
        ({"importance_sampling_level": "sequence", "loss_type": "sapo"}, r"its ratio is that of a token; use loss_type='grpo'"),
        ({"importance_sampling_level": "sequence", "beta": 0.1}, r"set use_bias_correction_kl=False"),
        ({"importance_sampling_level": "sequence", "delta": 2.0}, r"remove delta"),
        ({"entropy_coef": 0.1, "loss_type": "grpo"}, r"entropy_coef=0\.1 with loss_type='grpo'.*use loss_type='dapo'"),
        ({"scale_rewards": "words"}, r"scale_rewards='words': it is one of group, none, batch"),
        ({"multi_objective_aggregation": "sum"}, r"it is sum_then_normalize or normalize_then_sum"),
        ({"top_entropy_quantile": 0.2}, r"top_entropy_quantile=0\.2: .*clip_cov"),
        ({"use_adaptive_entropy": True}, r"use_adaptive_entropy=True: .*entropy_coef"),
        ({"sync_ref_model": True}, r"sync_ref_model=True: the reference is the model that the run begins with"),
        ({"generation_kwargs": {"suppress_tokens": [1]}}, r"generation_kwargs has suppress_tokens=\[1\]: it may have max_new_tokens"),
        ({"generation_kwargs": {"repetition_penalty": 1.2}}, r"generation_kwargs has repetition_penalty=1\.2: it is not the policy"),
        ({"num_generations": 1}, r"num_generations=1: rewards are compared within a group"),
        ({"num_generations": 3}, r"a generation batch has 8 samples, and takes whole groups of num_generations=3"),
        ({"generation_batch_size": 8, "steps_per_generation": 1}, r"each follows from the other; remove one"),
        ({"per_device_train_batch_size": 8, "generation_batch_size": 24, "gradient_accumulation_steps": 2}, r"one must be a multiple of the other"),
        ({"per_device_train_batch_size": 1, "generation_batch_size": 8}, r"a generation batch of 1 groups for 8 optimizer steps"),
        ({"vllm_mode": "remote"}, r"vllm_mode='remote': it is server or colocate"),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "all"}, r"vllm_importance_sampling_mode='all'"),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_min": 0.5}, r"small weights are not lifted"),
        ({"use_vllm": True, "vllm_importance_sampling_clip_min": 4.0}, r"must be less than vllm_importance_sampling_clip_max=3\.0"),
        ({"vllm_structured_outputs_regex": "a+"}, r"a grammar shapes what is sampled"),
        ({"save_strategy": "best"}, r"save_strategy='best': it is one of no, steps, epoch"),
        ({"num_iterations": 0}, r"num_iterations=0"),
        ({"model_init_kwargs": "{broken"}, r"model_init_kwargs is no JSON"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused_with_what_to_use(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": SimpleNamespace()}, r"model is SimpleNamespace; give the path of its folder\. model\.save_pretrained"),
        ({"rollout_func": reward}, r"rollout_func: agents of your own are an environment_factory"),
        ({"quantization_config": object()}, r"quantization_config: weights are float32 or bfloat16"),
        ({"reward_processing_classes": [object()]}, r"reward_processing_classes: .*load its tokenizer there"),
        ({"reward_funcs": SimpleNamespace(parameters=1)}, r"expected a function; a reward model is one that you call"),
        ({"eval_dataset": {"a": ROWS}}, r"eval_dataset is a dict of a: give one Dataset"),
        ({"train_dataset": {"train": ROWS}}, r"train_dataset is a dict of train: give one of its splits"),
        ({"peft_config": {"r": 4, "bias": "all"}}, r"peft_config has bias"),
        ({"optimizers": (1, None)}, r"optimizers: .*learning_rate"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(model: str, tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    whole = {"model": model, "reward_funcs": reward, "train_dataset": ROWS, "args": GRPOConfig(tmp_path / "run"), **arguments}
    with pytest.raises(ConfigError, match=message):
        GRPOTrainer(**whole)
    assert not (tmp_path / "run").exists()


def test_an_evaluation_needs_rows_and_weights_one_for_each_reward(model: str) -> None:
    with pytest.raises(ConfigError, match=r"eval_strategy='steps' without an eval_dataset"):
        GRPOTrainer(model, reward, GRPOConfig(eval_strategy="steps"), ROWS)
    with pytest.raises(ConfigError, match=r"reward_weights has 1 numbers for 2 reward functions"):
        GRPOTrainer(model, [reward, reward], GRPOConfig(reward_weights=[1.0]), ROWS)
    with pytest.raises(ConfigError, match=r"evaluate\(\) has no rows"):
        GRPOTrainer(model, reward, GRPOConfig(), ROWS).evaluate()
    with pytest.raises(ConfigError, match=r"push_to_hub: nothing is sent to a hub"):
        GRPOTrainer(model, reward, GRPOConfig(), ROWS).push_to_hub(dataset_name="x")


# --- The trainer's run -----------------------------------------------------------------------------------------------


def test_rows_weights_order_and_rows_for_evaluation_reach_the_run(model: str, tmp_path: Path) -> None:
    args = GRPOConfig(tmp_path / "run", use_cpu=True, eval_strategy="steps", reward_weights=[1.0, 0.5], shuffle_dataset=False)
    config = GRPOTrainer(
        model, [reward, lambda completions, **_: [1.0] * len(completions)], args, ROWS, eval_dataset=ROWS[:2]
    ).trainer.config
    source = config.environment.sources[0]
    assert (source.prompt, source.shuffle, source.heldout) == ("prompt", False, tmp_path / "run" / "data-heldout.jsonl")
    assert [each.weight for each in config.environment.rewards] == [1.0, 0.5] and config.rollout.max_staleness == 0


def test_rows_for_evaluation_are_left_alone_where_nothing_is_evaluated(model: str, tmp_path: Path) -> None:
    trainer = GRPOTrainer(model, reward, GRPOConfig(tmp_path / "run"), ROWS, eval_dataset=ROWS[:2])
    assert trainer.trainer.config.environment.sources[0].heldout is None


def test_a_reward_that_takes_any_keyword_gets_lists_though_it_names_no_completions() -> None:
    def of_environments(environments: list[Any], **columns: Any) -> list[float]:
        return [float(len(columns["completions"]))] * len(environments)

    taken = taking_completions(of_environments)
    assert list(inspect.signature(taken).parameters) == ["environments", "completions", "columns"]
    assert taken(environments=[1, 2], completions=["a", "b"]) == [2.0, 2.0]
    assert taking_completions(reward) is reward


def test_a_reward_that_asks_for_the_trainers_state_is_told_that_there_is_none() -> None:
    def with_state(completions: list[Any], trainer_state: Any, **columns: Any) -> list[float]:
        return [0.0] * len(completions)

    with pytest.warns(UserWarning, match=r"with_state asks for trainer_state, which is None"):
        taking_completions(with_state)


def test_steps_are_counted_and_logged_as_trl_does(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = GRPOConfig(
        tmp_path / "run", num_iterations=2, max_steps=8, logging_steps=4, disable_tqdm=True, eval_strategy="steps", num_generations_eval=2
    )
    heard: list[tuple[str, int]] = []

    class Callback:
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            heard.append(("log", state.global_step))

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
            heard.append(("evaluate", metrics["eval_reward"]))

    trainer = GRPOTrainer(model, reward, args, ROWS, eval_dataset=ROWS[:1], callbacks=[Callback()])
    assert trainer.state.max_steps == 8
    for step in (1, 2, 3, 4):
        trainer._stepped(line(step))
    for source in ("data", "samples/data"):
        trainer._evaluated(EvaluationLine(version=4, step=4, seconds=1.0, source=source, num_tasks=1, mean_reward=0.75))
    assert heard == [("log", 4), ("log", 8), ("log", 8), ("evaluate", 0.75)]
    assert trainer.state.log_history[-1] == {"eval_reward": 0.75, "step": 8, "epoch": pytest.approx(4 / 6)}
    first = trainer.state.log_history[0]
    assert (first["reward"], first["rewards/correct/mean"], first["digits"], first["step"]) == (0.5, 0.25, 3.0, 4)
    assert first["epoch"] == pytest.approx(2 / 6), "two batches of one group each, of six rows"
    assert "'reward': 0.5" in capsys.readouterr().out


def line(step: int) -> StepLine:
    return StepLine(
        step=step, version=step, seconds=1.0, step_seconds=0.5, tokens=40, groups=1, rollouts=8, reward=0.5, reward_spread=0.1, generated_length=9.0,
        truncated_share=0.25, generation_rate=8.0, training_rate=6.0, components={"correct": 0.25},
        metrics={"tools/calls": 2.0, "digits": 3.0, "rewards/seconds": 0.1},
        trainer={"rho/k3": 0.01, "clip/low_share": 0.02, "clip/high_share": 0.03, "entropy/estimate": 1.5, "loss": 0.1}, totals=Totals(),
    )  # fmt: skip


def test_metrics_have_the_names_of_grpo() -> None:
    found = grpo_metrics(line(1))
    assert found["clip_ratio/region_mean"] == pytest.approx(0.05) and found["step_time"] == 0.5 and found["digits"] == 3.0
    assert (found["reward"], found["reward_std"], found["completions/clipped_ratio"], found["entropy"]) == (0.5, 0.1, 0.25, 1.5)
    assert "kl" not in found, "the divergence from the reference is not measured"
    assert not [name for name in found if name.startswith(("sample/", "batch/", "perf/"))]


# --- What scripts import beside --------------------------------------------------------------------------------------


def test_a_command_line_is_read_as_trls_parser_does(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 1.0e-4\nnum_generations: 4\nmodel_name_or_path: elsewhere\n")
    words = [
        "--config", str(file), "--output_dir", "out", "--num_generations", "2", "--use_peft", "--lora_target_modules", "q_proj", "v_proj",
        "--reward_weights", "1", "0.5", "--chat_template_kwargs", '{"enable_thinking": false}', "--log_completions", "--dataset_name", "data",
    ]  # fmt: skip
    script, training, chosen = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config(words)
    assert (script.dataset_name, script.dataset_train_split, chosen.model_name_or_path) == ("data", "train", "elsewhere")
    assert (training.output_dir, training.learning_rate, training.num_generations) == ("out", 1e-4, 2)
    assert training.given == {"output_dir", "learning_rate", "num_generations", "reward_weights", "chat_template_kwargs", "log_completions"}
    assert training.reward_weights == [1.0, 0.5] and training.chat_template_kwargs == {"enable_thinking": False}
    peft = get_peft_config(chosen)
    assert peft is not None and (peft["r"], peft["target_modules"]) == (16, ["q_proj", "v_proj"])
    assert get_peft_config(ModelConfig()) is None and get_quantization_config(chosen) is None


def test_unknown_words_and_quantised_weights_are_refused(tmp_path: Path) -> None:
    parser = TrlParser((GRPOConfig, ModelConfig))
    with pytest.raises(ConfigError, match=r"unknown words on the command line: --num_generationz 2.*num_generations"):
        parser.parse_args_and_config(["--output_dir", "out", "--num_generationz", "2"])
    file = tmp_path / "run.yaml"
    file.write_text("learning_rat: 1\n")
    with pytest.raises(ConfigError, match=r"unknown option 'learning_rat'.*learning_rate"):
        parser.parse_args_and_config(["--config", str(file)])
    with pytest.raises(ConfigError, match=r"load_in_4bit=True: weights are float32 or bfloat16"):
        get_quantization_config(ModelConfig(load_in_4bit=True))


def said(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_shipped_rewards_have_trls_names_and_values() -> None:
    assert think_format_reward(said("<think>a</think> b", "a</think> b", "<think>a<think>b</think>")) == [1.0, 0.0, 0.0]
    assert accuracy_reward(said(r"so $\boxed{2}$", r"\boxed{3}", "2"), solution=["2", "2", "no number"]) == [1.0, 0.0, None]
    reasoned = said(r"<think>\boxed{3}</think> \boxed{2}", r"\boxed{2}")
    assert reasoning_accuracy_reward(reasoned, solution=["2", "2"]) == [1.0, 0.0]
    ids = [[1] * 6, [1] * 8, [1] * 10, [1] * 12]
    assert get_soft_overlong_punishment(10, 4)(completions=said(*"abcd"), completion_ids=ids) == [0.0, -0.5, -1.0, -1.0]
    # Runs of two in 1 2 1 2 1: (1, 2), (2, 1), (1, 2), (2, 1): two of four occurred before.
    assert get_repetition_penalty_reward(2, -1.0)(completions=said("a", "b"), completion_ids=[[1, 2, 1, 2, 1], [1]]) == [-0.5, 0.0]
    halfway = get_cosine_scaled_reward(100)(
        completions=said(r"\boxed{2}", r"\boxed{3}"), solution=["2", "2"], completion_ids=[[1] * 50] * 2
    )
    assert halfway == pytest.approx([0.75, -0.75]), "halfway between the short and the long answer's"
    with pytest.raises(ConfigError, match=r"soft_punish_cache is 11"):
        get_soft_overlong_punishment(10, 11)


def test_a_function_of_a_script_that_names_no_completions_is_called_in_another_process_as_one_of_a_group(tmp_path: Path) -> None:
    source = "def of_environments(environments, **kwargs):\n    return [each.score for each in environments]\n"
    program = {"__name__": "__main__"}
    exec(source, program)
    packed = given.pack({"tries": taking_completions(program["of_environments"])})
    given.read(io.BytesIO(packed))
    try:
        function = RewardFunction(
            RewardSection(entry="midflight.given:tries"), load_entry("midflight.given:tries", option="x", such_as="y")
        )
    finally:
        given.read(io.BytesIO(given.NOTHING))
    assert function.is_of_group and "environments" in function.named and function.columns == ()
