"""Scripts of the shapes of trl's own examples train with the import, the model and the data of here: a quick start, a command line with adapters
and evaluations, and a game with tools whose reward is in its environments.

`make test-trl` also runs trl's own: with MIDFLIGHT_TRL, a folder with its package, the script of `trl grpo`; with MIDFLIGHT_TRL_SOURCE, a checkout,
its example scripts.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.real.processes import Command

from midflight.models.creation import make_model
from midflight.models.export import export_model
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.text.tokenizer import Tokenizer


def run(folder: Path, body: str, *words: str, seconds: float = 110) -> Command:
    (folder / "program.py").write_text(body)
    command = Command(*words, folder=folder, module="program")
    try:
        assert command.wait(seconds) == 0, command.said
    finally:
        command.end()
    return command


def last(command: Command) -> Any:
    """What the program printed last, as JSON."""
    return json.loads(command.output.read_text().splitlines()[-1])


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a model that is small, of random weights, and has room for the schemas of tools."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_context": 4096}
    tokens = tmp_path / "tokens"
    write_byte_tokenizer(tokens)
    made = make_model(vocab_size=Tokenizer.load(tokens).vocab_size, seed=0, dtype="float32", **sizes)
    export_model(made, tokens, tmp_path / "model")
    return tmp_path


QUICK = """
import json
from datasets import Dataset
from midflight.integrations.trl import GRPOConfig, GRPOTrainer

dataset = Dataset.from_list([{"prompt": f"write {number}", "most": 16} for number in range(8)])
half = 0.5

def small_letters(prompts, completions, most, log_metric, **kwargs):
    found = [sum(letter.islower() for letter in completion) / length for completion, length in zip(completions, most)]
    log_metric("letters", sum(found))
    return found

trainer = GRPOTrainer(
    model="model",
    reward_funcs=[small_letters, lambda completion_ids, **kwargs: [half] * len(completion_ids)],
    args=GRPOConfig("out", max_steps=40, per_device_train_batch_size=16, max_completion_length=16, learning_rate=1e-2, lr_scheduler_type="constant",
                    logging_steps=1, num_iterations=2, beta=0.001, reward_weights=[1.0, 0.0], disable_tqdm=True, save_strategy="no", use_cpu=True),
    train_dataset=dataset,
)
output = trainer.train()
trainer.save_model("out")
history = trainer.state.log_history
print(json.dumps({"steps": output.global_step, "rewards": [logs["reward"] for logs in history], "letters": history[0]["letters"],
                  "of": trainer.model.config.hidden_size, "weight": trainer.trainer.config.environment.rewards[1].weight}))
"""


def test_a_quick_start_trains_and_its_reward_rises(here: Path) -> None:
    found = last(run(here, QUICK))
    rewards = found["rewards"]
    assert found["steps"] == 40 and len(rewards) == 20, "two updates a step, as num_iterations asks"
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert found["letters"] > 0 and found["of"] == 32 and found["weight"] == 0.0
    assert (here / "out" / "model.safetensors").is_file(), "save_model(output_dir), as scripts end"


COMMAND_LINE = """
import json
from datasets import load_dataset
from midflight.integrations.trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config
from midflight.integrations.trl.rewards import accuracy_reward, think_format_reward

if __name__ == "__main__":
    script_args, training_args, model_args = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
    training_args.model_init_kwargs = {"revision": model_args.model_revision, "attn_implementation": model_args.attn_implementation, "dtype": model_args.dtype}
    dataset = load_dataset(script_args.dataset_name, split=script_args.dataset_train_split)
    dataset = dataset.map(lambda row: {"prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": row["problem"]}]})
    parts = dataset.train_test_split(test_size=2, seed=0)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[think_format_reward, accuracy_reward],
        train_dataset=parts["train"],
        eval_dataset=parts["test"] if training_args.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print("saved")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    print(json.dumps({"history": trainer.state.log_history, "rank": trainer.trainer.config.lora.rank, "scores": trainer.evaluate()}))
"""


def test_a_command_line_with_adapters_trains_and_evaluates(here: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("math_verify")
    data = here / "data"
    data.mkdir()
    rows = [{"problem": f"{number} + 1?", "solution": str(number + 1)} for number in range(6)]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "--model_name_or_path", "model", "--dataset_name", "data", "--output_dir", "out", "--max_steps", "2", "--max_completion_length", "8", "--use_peft",
        "--lora_target_modules", "q_proj", "v_proj", "--num_generations", "2", "--per_device_train_batch_size", "2", "--eval_strategy", "steps",
        "--eval_steps", "1", "--logging_steps", "1", "--log_completions", "--use_cpu", "--importance_sampling_level", "sequence", "--loss_type", "grpo",
    ]  # fmt: skip
    found = last(run(here, COMMAND_LINE, *words))
    evaluated = [logs["step"] for logs in found["history"] if "eval_reward" in logs]
    assert found["rank"] == 16 and evaluated == [0, 1, 2, 2] and found["scores"] == {"eval_reward": 0.0}
    assert [logs["step"] for logs in found["history"] if "rewards/think_format_reward/mean" in logs] == [1, 2]


GAME = """
import json
from datasets import Dataset
from peft import LoraConfig
from midflight.integrations.trl import GRPOConfig, GRPOTrainer

class Guess:
    def reset(self, secret, **kwargs):
        self.secret, self.tries = secret, 0
        return " Begin."

    def guess(self, number: int) -> str:
        \"\"\"Says whether it is higher.

        Args:
            number: The guess.
        \"\"\"
        self.tries += 1
        return "right" if number == self.secret else "no"

def tries(environments, **kwargs):
    return [float(environment.tries) + environment.secret for environment in environments]

dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Guess."}]] * 2, "secret": [3, 4]})
trainer = GRPOTrainer(
    model="model", train_dataset=dataset, reward_funcs=tries, environment_factory=Guess, peft_config=LoraConfig(),
    args=GRPOConfig("out", num_train_epochs=1, num_generations=2, per_device_train_batch_size=2, max_completion_length=8, logging_steps=1,
                    chat_template_kwargs={"enable_thinking": False}, report_to="none", use_cpu=True),
)
trainer.train()
print(json.dumps([logs["reward"] for logs in trainer.state.log_history]))
"""


def test_a_game_with_tools_trains_on_what_its_environments_say(here: Path) -> None:
    pytest.importorskip("peft")
    assert sorted(last(run(here, GAME))) == [3.0, 4.0], "one step for each row, and no tool was called"


# --- trl's own scripts -----------------------------------------------------------------------------------------------

PACKAGE = os.environ.get("MIDFLIGHT_TRL", "")
"""A folder with the package trl."""
SOURCE = os.environ.get("MIDFLIGHT_TRL_SOURCE", "")
"""A checkout of trl, whose examples are not in its package."""
FLAGS = [
    "--model_name_or_path",
    "model",
    "--output_dir",
    "out",
    "--max_completion_length",
    "16",
    "--max_steps",
    "2",
    "--num_generations",
    "8",
]
SCRIPTS: dict[str, list[str]] = {
    "grpo_2048.py": [],
    "grpo_continuous_batching.py": [*FLAGS, "--dataset_name", "gsm8k", "--dataset_config", "default", "--use_peft"],
    "gspo.py": [*FLAGS, "--importance_sampling_level", "sequence", "--epsilon", "3e-4", "--epsilon_high", "4e-4", "--loss_type", "grpo"],
}
CHANGES = {
    r"from trl import": "from midflight.integrations.trl import",
    r"from trl\.rewards import": "from midflight.integrations.trl.rewards import",
    r'"Qwen/[^"]*"': '"model"',
    r"AI-MO/NuminaMath-TIR": "math",
    r'report_to="trackio"': 'report_to="none"',
    r"range\(1000\)": "range(1)",
}
"""The import, the model and the data; and no account of a tracker."""


def changed(script: Path) -> str:
    """The script with the changes."""
    text = script.read_text()
    for pattern, change in CHANGES.items():
        text = re.sub(pattern, change, text)
    return text


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.skipif(not PACKAGE, reason="MIDFLIGHT_TRL names no folder with trl: make test-trl")
@pytest.mark.parametrize("data", ["name", "mixture"])
def test_the_script_of_trl_grpo_trains(here: Path, data: str) -> None:
    pytest.importorskip("peft")
    write_rows(here / "sums", [{"prompt": f"{number} + 1?", "solution": str(number + 1)} for number in range(4)])
    (here / "mixture.yaml").write_text("datasets:\n  - path: sums\n    columns: [prompt, solution]\n  - path: sums\n    split: test\n")
    named = {"name": ["--dataset_name", "sums"], "mixture": ["--config", "mixture.yaml"]}
    flags = [
        *FLAGS,
        *named[data],
        "--reward_funcs",
        "think_format_reward",
        "get_soft_overlong_punishment",
        "--per_device_train_batch_size",
        "8",
    ]
    run(here, changed(Path(PACKAGE) / "trl" / "scripts" / "grpo.py"), *flags, seconds=300)
    assert (here / "out" / "model.safetensors").is_file(), "save_model(output_dir), as the script ends"


@pytest.mark.skipif(not SOURCE, reason="MIDFLIGHT_TRL_SOURCE names no checkout of trl")
@pytest.mark.parametrize("script", SCRIPTS)
def test_trls_own_script_trains(here: Path, script: str) -> None:
    write_rows(here / "gsm8k", [{"question": f"{number} + 1?", "answer": f"#### {number + 1}"} for number in range(4)])
    write_rows(here / "math", [{"problem": f"{number} + 1?", "solution": str(number + 1), "messages": []} for number in range(40)])
    run(here, changed(Path(SOURCE) / "examples" / "scripts" / script), *SCRIPTS[script], seconds=300)
    assert list(here.glob("*/model/model.safetensors"))
