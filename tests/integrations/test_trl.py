"""trl's arguments, without trl: every one is taken, refused with what to use, or said to be without effect."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from midflight.errors import ConfigError
from midflight.integrations.trl import AsyncGRPOConfig, AsyncGRPOTrainer
from midflight.integrations.trl.environments import environment_class, rows_of_environments
from midflight.integrations.trl.metrics import trl_metrics
from midflight.models.creation import make_model
from midflight.observe.lines import StepLine
from midflight.observe.status import Totals
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.text.tokenizer import Tokenizer

TRAINER = [
    "model",
    "reward_funcs",
    "args",
    "train_dataset",
    "processing_class",
    "callbacks",
    "optimizers",
    "peft_config",
    "tools",
    "environment_factory",
    "rollout_worker",
    "weight_transfer",
]
"""The arguments of trl 1.16.0's trainer, in their order."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "small"
    tokens = folder.with_name("tokens")
    write_byte_tokenizer(tokens)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_context": 128}
    made = make_model(vocab_size=Tokenizer.load(tokens).vocab_size, seed=0, dtype="float32", **sizes)
    from midflight.models.export import export_model

    export_model(made, tokens, folder)
    return str(folder)


def reward(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


ROWS = [{"prompt": "1 + 1", "answer": "2"}] * 6


def test_the_trainer_has_the_arguments_of_trl_in_their_order() -> None:
    assert list(inspect.signature(AsyncGRPOTrainer.__init__).parameters)[1:] == TRAINER


def test_options_become_sections(model: str) -> None:
    args = AsyncGRPOConfig(
        "runs/mine", per_device_train_batch_size=8, gradient_accumulation_steps=2, num_generations=4, num_train_epochs=2,
        learning_rate=1e-5, lr_scheduler_type="cosine", warmup_steps=0.1, epsilon=0.2, epsilon_high=0.28, max_staleness=2, weight_sync_steps=3,
        max_completion_length=64, temperature=0.9, top_p=0.8, top_k=5, max_tool_calling_iterations=3, max_inflight_tasks=32, token_budget=2048, seed=7, bf16=True,
        save_strategy="epoch", save_total_limit=3, log_completions=True, num_completions_to_print=5, chat_template_kwargs={"thinking": False},
        vllm_server_base_url="http://127.0.0.1:9000/", vllm_server_timeout=10, use_cpu=True, queue_maxsize=40, run_name="named",
    )  # fmt: skip
    found = args.tables(model=model, num_rows=20)
    assert args.groups_per_step == 4 and found["run"] == {"name": "named", "steps": 10, "seed": 7, "stall_seconds": 300.0}
    assert found["rollout"] == {
        "groups_per_step": 4, "group_size": 4, "max_staleness": 2, "max_in_flight": 32, "buffer_groups": 10, "show_every": 1, "show_completions": 5,
    }  # fmt: skip
    trainer = found["trainer"]
    assert (trainer["schedule"], trainer["warmup_steps"], trainer["checkpoint_every"], trainer["keep_checkpoints"]) == ("cosine", 1, 5, 3)
    assert (trainer["micro_batch_tokens"], trainer["compute_dtype"], trainer["device"]) == (2048, "bfloat16", "cpu")
    assert found["objective"] == {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28} and found["weights"] == {"every": 3}
    assert (found["environment"]["top_p"], found["environment"]["top_k"], found["environment"]["min_p"]) == (0.8, 5, 0.0)
    assert found["environment"]["max_turns"] == 4 and found["environment"]["template_options"] == {"thinking": False}
    assert found["engine"] == {"device": "cpu", "kind": "vllm", "urls": ["http://127.0.0.1:9000"], "start_seconds": 10.0}


def test_defaults_start_an_engine_here_and_answers_fit_into_the_model(model: str) -> None:
    found = AsyncGRPOConfig().tables(model=model, num_rows=24)
    assert found["run"]["steps"] == 72, "three epochs of 24 groups, one a step"
    assert found["environment"]["max_tokens"] == 127 and "kind" not in found["engine"]
    assert (found["trainer"]["checkpoint_every"], found["trainer"]["adam_beta2"]) == (500, 0.999)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generation": 4}, r"no option 'num_generation'.*num_generations"),
        ({"beta": 0.1}, r"no option 'beta'"),
        ({"repetition_penalty": 1.1}, r"repetition_penalty=1\.1: it is not the policy that is sampled then"),
        ({"fp16": True}, r"fp16=True: .*bf16=True"),
        ({"eval_strategy": "steps"}, r"eval_strategy='steps': .*midflight\.Trainer with heldout"),
        ({"deepspeed": "z3.json"}, r"deepspeed='z3\.json': set trainer\.ranks"),
        ({"num_generations": 3}, r"is 8, and a step takes whole groups of num_generations=3"),
        ({"lr_scheduler_type": "polynomial"}, r"lr_scheduler_type='polynomial': schedules are"),
        ({"adam_beta1": 0.8}, r"adam_beta1=0\.8: it is 0\.9 here"),
        ({"dtype": "float16"}, r"dtype='float16'"),
        ({"optim": "sgd"}, r"optim='sgd'"),
        ({"save_strategy": "best"}, r"save_strategy='best'"),
    ],
)
def test_what_has_no_meaning_is_refused_with_what_to_use(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AsyncGRPOConfig(**options)


def test_values_that_ask_for_nothing_are_taken_and_idle_ones_are_said() -> None:
    assert AsyncGRPOConfig(top_p=1.0, top_k=0, min_p=None, eval_strategy="no", fp16=False).notes == []
    assert AsyncGRPOConfig(dataloader_num_workers=4).notes == ["dataloader_num_workers: accepted, and without effect here"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "Qwen/Qwen2.5-0.5B-Instruct"}, r"there is no such folder: nothing is fetched from a hub"),
        ({"optimizers": (1, None)}, r"optimizers: .*learning_rate"),
        ({"rollout_worker": 1}, r"rollout_worker: .*environments\.md"),
        ({"weight_transfer": 1}, r"weight_transfer: .*weights\.transport"),
        ({"processing_class": SimpleNamespace(name_or_path="elsewhere")}, r"processing_class is of 'elsewhere'.*leave it out"),
        ({"train_dataset": None}, r"train_dataset is missing"),
        ({"train_dataset": [{"question": "1"}]}, r"no column `prompt`; it has question"),
        ({"train_dataset": "data.jsonl"}, r"train_dataset is 'data\.jsonl'; load it"),
        ({"reward_funcs": None}, r"nothing gives a reward"),
        ({"reward_funcs": "a/reward-model"}, r"expected a function"),
        ({"peft_config": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1}}, r"peft_config has lora_dropout"),
        ({"args": 3}, r"import AsyncGRPOConfig from midflight\.integrations\.trl"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(model: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AsyncGRPOTrainer(**{"model": model, "reward_funcs": reward, "train_dataset": ROWS, **arguments})


# --- Environments ----------------------------------------------------------------------------------------------------


class Counter:
    """Counts."""

    def __init__(self, start: int = 0) -> None:
        self.value = self.start = start

    def reset(self, start: int, **row: Any) -> str:
        self.value = start
        return f"count from {start}"

    def add(self, number: int) -> int:
        """Adds.

        Args:
            number: how much.
        """
        self.value += number
        return self.value

    def get_reward(self) -> float:
        return float(self.value)


@pytest.mark.parametrize("factory", [Counter, lambda: Counter(5)])
def test_an_environment_of_trl_becomes_a_class_with_reset_tools_and_reward(factory: Callable[[], Any]) -> None:
    made = environment_class(factory)()
    assert made.reset(start=3, task=object(), other=1) == "count from 3"
    assert made.add(number=4) == 7 and made.reward() == 7.0
    assert str(inspect.signature(type(made).add)) == str(inspect.signature(Counter.add)) and "how much" in (type(made).add.__doc__ or "")
    assert not hasattr(type(made), "get_reward"), "which would be a tool"


def test_a_reward_function_sees_the_attributes_of_the_environment_that_was_made() -> None:
    made = environment_class(Counter)()
    made.reset(start=3, task=object())
    assert made.value == 3
    with pytest.raises(AttributeError, match="other"):
        _ = made.other


def test_without_data_each_environment_has_prompts_of_its_own() -> None:
    assert rows_of_environments(Counter, number=2) == [{"prompt": [{"role": "user", "content": ""}]}] * 2
    assert [row["environment"] for row in rows_of_environments({"a": Counter, "b": Counter}, number=3)] == ["a", "b", "a"]


def test_an_environment_without_reset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"makes a object without `reset`"):
        environment_class(object)


# --- Metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_have_the_names_of_trl() -> None:
    line = StepLine(
        step=1, version=1, seconds=1.0, step_seconds=0.5, tokens=40, groups=2, rollouts=8, reward=0.5, reward_spread=0.1, generated_length=9.0,
        truncated_share=0.25, lengths={"min": 1.0, "max": 20.0}, staleness_mean=1.0, staleness_max=2, generation_rate=8.0, training_rate=6.0,
        components={"correct": 0.5}, metrics={"tools/calls": 2.0, "tools/failures": 1.0, "tools/seconds": 1.0}, dropped={"stale": 1},
        waits={"trainer for generation": 2.0, "admission for trainer": 1.0}, trainer={"rho/k3": 0.01, "clip/low_share": 0.02}, totals=Totals(),
    )  # fmt: skip
    found = trl_metrics(line, group_size=4)
    assert {name: found[name] for name in ("reward", "reward_std", "rewards/correct", "kl", "clip_ratio/low_mean")} == {
        "reward": 0.5, "reward_std": 0.1, "rewards/correct": 0.5, "kl": 0.01, "clip_ratio/low_mean": 0.02,
    }  # fmt: skip
    assert (found["completions/mean_length"], found["completions/max_length"], found["completions/clipped_ratio"]) == (9.0, 20.0, 0.25)
    assert (found["sample/staleness_max"], found["sample/dropped_stale_total"], found["perf/rollout_wait_s"]) == (2.0, 1.0, 2.0)
    assert (found["tools/call_frequency"], found["tools/failure_frequency"], found["tools/latency_s"]) == (2.0, 0.5, 0.5)
    assert found["batch/samples_per_step"] == 8.0


def test_report_to_names_the_trackers_of_a_run() -> None:
    def trackers(report_to: object) -> list[str]:
        return AsyncGRPOConfig("x", report_to=report_to).trackers

    assert (trackers("none"), trackers(None), trackers([]), trackers("wandb")) == ([], [], [], ["wandb"])
    assert trackers(["tensorboard", "trackio"]) == ["tensorboard", "trackio"]
    assert "tensorboard" in trackers("all"), "which is installed here"
