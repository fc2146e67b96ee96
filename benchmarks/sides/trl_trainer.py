"""trl's side of `training.py`: `GRPOTrainer`, driven by its own loop.

The interpreter of trl's own environment runs it, from the folder of the benchmarks.

    python -m sides.trl_trainer step FOLDER OUT STEPS
    python -m sides.trl_trainer reward PLAN OUT
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from harness.processes import held_mib, peak_mib, reset_peak, resident_mib
from harness.rounds import Meter, timed
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from sides.rewards import REWARDS


def options(**more: Any) -> GRPOConfig:
    """Makes options as near to ours as trl's come: DAPO's loss and clips, AdamW without decay,
    float32, no logging to anywhere.
    """
    return GRPOConfig(
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        **more,
    )


# --- The step alone -------------------------------------------------------------------------------


def step(folder: Path, out: Path, steps: int) -> None:
    """Times forward, backward and optimiser step; preparing inputs (generation, rewards,
    advantages, padding) is left out.
    """
    shape = json.loads((folder / "shape.json").read_text())
    data = np.load(folder / "batch.npz")
    meter = Meter()
    size = shape["num_groups"] * shape["group_size"]
    group = shape["group_size"]
    answers = [a.tolist() for a in np.split(data["completions"], np.cumsum(data["lengths"])[:-1])]

    def written(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """The completions that were written down, in the order in which trl asks for its groups."""
        groups = [int(prompt) for prompt in prompts]
        members = [g * group + groups[:i].count(g) for i, g in enumerate(groups)]
        return {
            "prompt_ids": [data["prompts"][g].tolist() for g in groups],
            "completion_ids": [answers[m] for m in members],
            "logprobs": None,
            "member": members,
        }

    class Timed(GRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            prepare = super()._prepare_inputs
            inputs, cost = timed(lambda: prepare(generation_batch))
            meter.leave_out(cost)
            return inputs

    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=lambda member, **_: [float(data["rewards"][m]) for m in member],
        train_dataset=Dataset.from_dict({"prompt": [str(g) for g in range(shape["num_groups"])]}),
        args=options(
            output_dir=str(out.with_suffix("")),
            per_device_train_batch_size=shape["at_once"] or size,
            num_generations=group,
            max_steps=steps,
            gradient_accumulation_steps=size // (shape["at_once"] or size),
            max_completion_length=shape["longest"],
            learning_rate=1e-5,
            lr_scheduler_type="constant",
        ),
        rollout_func=written,
        callbacks=[_Steps(meter, out.with_suffix(".npz"))],
    )
    before = resident_mib()
    reset_peak()
    trainer.train()
    meter.write(out, peak_mib=peak_mib(), loaded_mib=before, tokens=int(data["lengths"].sum()))


class _Steps(TrainerCallback):
    def __init__(self, meter: Meter, gradient: Path) -> None:
        self._meter = meter
        self._gradient = gradient

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._meter.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._meter.end()

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        if self._gradient.exists():
            return
        gradients = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.numpy()
        np.savez(self._gradient, **gradients)


# --- To the same reward ---------------------------------------------------------------------------


def reward(plan: Path, out: Path) -> None:
    """Trains until the mean reward over the last steps reaches the target, or for as many steps as
    the plan says.
    """
    numbers = json.loads((plan / "numbers.json").read_text())
    tasks = json.loads((plan / "tasks.json").read_text())
    until = _Until(numbers["target"], numbers["window"])
    rows = []
    for question, expected in tasks:
        rows.append({"prompt": [{"role": "user", "content": question}], "answer": expected})

    def scored(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        reward_of = REWARDS[numbers["race"]]
        found = []
        for completion, expected in zip(completions, answer, strict=True):
            found.append(reward_of(completion[0]["content"], expected))
        until.rewards.append(sum(found) / len(found))
        return found

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(numbers["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(numbers["model"]),
        reward_funcs=scored,
        train_dataset=Dataset.from_list(rows),
        args=options(
            output_dir=str(out.with_suffix("")),
            per_device_train_batch_size=numbers["groups"] * numbers["group_size"],
            num_generations=numbers["group_size"],
            max_completion_length=numbers["max_tokens"],
            max_steps=numbers["steps"],
            seed=numbers["seed"],
            learning_rate=numbers["learning_rate"],
            warmup_steps=numbers["warmup_steps"],
            lr_scheduler_type="constant_with_warmup",
        ),
        callbacks=[until],
    )
    trainer.train()
    found = {
        "seconds": until.seconds,
        "cpu": until.cpu,
        "steps": len(until.rewards),
        "rewards": until.rewards,
        "reached": until.reached,
    }
    out.write_text(json.dumps(found | {"peak_mib": held_mib()}))


class _Until(TrainerCallback):
    """Ends training when the mean of the last rewards is at the target, and keeps the time that it
    took.
    """

    def __init__(self, target: float, window: int) -> None:
        self.rewards: list[float] = []
        self.seconds = self.cpu = 0.0
        self._target = target
        self._window = window
        self._start = (0.0, 0.0)

    @property
    def reached(self) -> bool:
        return (
            len(self.rewards) >= self._window
            and sum(self.rewards[-self._window :]) / self._window >= self._target
        )

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._start = (time.perf_counter(), time.process_time())

    def on_step_end(self, _args: Any, _state: Any, control: Any, **__: Any) -> None:
        self.cpu = time.process_time() - self._start[1]
        self.seconds = time.perf_counter() - self._start[0]
        control.should_training_stop |= self.reached


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    part, place, result, *rest = sys.argv[1:]
    if part == "step":
        step(Path(place), Path(result), int(rest[0]))
    else:
        reward(Path(place), Path(result))
