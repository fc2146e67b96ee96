"""Supervised warm start: a trainer and an in-process engine take turns until held-out accuracy is reached."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence

from transformers import PreTrainedModel

from midflight.config.sections import Config
from midflight.engines.embedded.batch import generate_all
from midflight.environments.rewards import exact_match
from midflight.environments.sources import Source
from midflight.run.messages import WarmStart
from midflight.text.tokenizer import Tokenizer
from midflight.trainer.schedule import Schedule
from midflight.trainer.sft import Example, SupervisedTrainer
from midflight.types import GenerateRequest, SamplingParams, Task

EVALUATED_TASKS = 256
"""Held-out tasks of the first source that the accuracy is taken on: a standard error of at most 0.03."""


async def warm_start(model: PreTrainedModel, tokenizer: Tokenizer, sources: Sequence[Source], config: Config, tell: Callable[[WarmStart], None]) -> None:
    """Trains on answers until exact match on the first source's held-out tasks, sampled, reaches the target.

    Waits for its own steps only, each in a thread; ended by the accuracy, by `max_steps`, or by cancellation between steps.
    """
    section = config.warm_start
    if section.target_accuracy is None:
        return
    schedule = Schedule(kind="constant", warmup_steps=20, total_steps=section.max_steps)
    trainer = SupervisedTrainer(model, learning_rate=section.learning_rate, schedule=schedule)
    examples = _examples(tokenizer, sources, seed=config.run.seed)
    heldout = sources[0].heldout[:EVALUATED_TASKS]
    for step in range(1, section.max_steps + 1):
        loss = await asyncio.to_thread(trainer.step, [next(examples) for _ in range(section.batch)])
        accuracy = None
        if step % section.evaluate_every == 0:
            accuracy = await asyncio.to_thread(_accuracy, model, tokenizer, heldout, config, seed=step)
        tell(WarmStart(step, loss, accuracy))
        if accuracy is not None and accuracy >= section.target_accuracy:
            return


def prompt_ids(tokenizer: Tokenizer, task: Task) -> tuple[int, ...]:
    """The ids that a single-turn agent's request for the task becomes."""
    return tokenizer.encode(tokenizer.render([{"role": "user", "content": str(task.data["question"])}], add_generation_prompt=True))


def _examples(tokenizer: Tokenizer, sources: Sequence[Source], *, seed: int) -> Iterator[Example]:
    """Endless examples, sources by weight, tasks in seeded order without replacement within a source's epoch."""
    draw = random.Random(seed)
    end = min(tokenizer.eos_token_ids)
    epochs = [_epochs(source.training, random.Random(f"{seed}/{source.name}")) for source in sources]
    weights = [source.weight for source in sources]
    while True:
        task = next(draw.choices(epochs, weights)[0])
        yield prompt_ids(tokenizer, task), (*tokenizer.encode(str(task.data["answer"])), end)


def _epochs(tasks: Sequence[Task], order: random.Random) -> Iterator[Task]:
    while True:
        yield from order.sample(tasks, len(tasks))


def _accuracy(model: PreTrainedModel, tokenizer: Tokenizer, tasks: Sequence[Task], config: Config, *, seed: int) -> float:
    """Exact match of one sampled answer per task, at the temperature of the environment."""
    sampling = SamplingParams(max_tokens=config.environment.max_tokens, temperature=config.environment.temperature)
    requests = [_request(prompt_ids(tokenizer, task), sampling, number, seed) for number, task in enumerate(tasks)]
    answers = generate_all(model, requests, tokenizer=tokenizer, max_running=len(requests), max_context=config.model.max_context)
    texts = [tokenizer.decode(answer.token_ids, skip_special=True) for answer in answers]
    return sum(exact_match(text, str(task.data["answer"])) for text, task in zip(texts, tasks, strict=True)) / len(tasks)


def _request(ids: tuple[int, ...], sampling: SamplingParams, number: int, seed: int) -> GenerateRequest:
    seeded = SamplingParams(max_tokens=sampling.max_tokens, temperature=sampling.temperature, seed=seed * 1_000_003 + number)
    return GenerateRequest(f"{number:032x}", ids, len(ids), seeded)
