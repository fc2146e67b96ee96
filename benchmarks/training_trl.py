"""trl's side of `training.py`, run by the interpreter of trl's own environment: `GRPOTrainer`,
driven by its own loop.
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
from training_both import REWARDS, Meter, held_mib, peak_mib, reset_peak, resident_mib
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def options(**more: Any) -> GRPOConfig:
    """As near to ours as trl's options come: DAPO's loss and clips, AdamW without decay, float32,
    no logging to anywhere.
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
            wall = time.perf_counter()
            cpu = time.process_time()
            inputs = super()._prepare_inputs(generation_batch)
            meter.leave_out(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)
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
        if not self._gradient.exists():
            np.savez(
                self._gradient,
                **{
                    name: p.grad.numpy()
                    for name, p in model.named_parameters()
                    if p.grad is not None
                },
            )


# --- To the same reward ---------------------------------------------------------------------------


def reward(plan: Path, out: Path) -> None:
    """Trains until the mean reward over the last steps reaches the target, or for as many steps as
    the plan says.
    """
    numbers = json.loads((plan / "numbers.json").read_text())
    tasks = json.loads((plan / "tasks.json").read_text())
    until = _Until(numbers["target"], numbers["window"])

    def scored(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        found = [
            REWARDS[numbers["race"]](c[0]["content"], a)
            for c, a in zip(completions, answer, strict=True)
        ]
        until.rewards.append(sum(found) / len(found))
        return found

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(numbers["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(numbers["model"]),
        reward_funcs=scored,
        train_dataset=Dataset.from_dict(
            {
                "prompt": [[{"role": "user", "content": q}] for q, _ in tasks],
                "answer": [a for _, a in tasks],
            }
        ),
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
    part, folder, out, *rest = sys.argv[1:]
    {"step": step, "reward": reward}[part](Path(folder), Path(out), *map(int, rest))
