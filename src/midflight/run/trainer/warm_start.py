"""Supervised warm start: a trainer and an in-process engine take turns until held-out accuracy is reached."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Iterator, Sequence

from transformers import PreTrainedModel

from midflight.config.sections import Config
from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.environments.single_turn import exact_match
from midflight.environments.tasks import Source
from midflight.errors import StepSkipped
from midflight.models.names import named_tensors
from midflight.run.parts import WarmStart
from midflight.text.tokenizer import Tokenizer
from midflight.trainer.optimizer import Schedule
from midflight.trainer.sft import Example, SupervisedTrainer
from midflight.types import GenerateRequest, SamplingParams, Task
from midflight.types.facts import unheard
from midflight.weights.transports.select import receiver

BATCH = 64
"""Examples of one step."""
EVALUATED_TASKS = 256
"""Held-out tasks of the first source that the accuracy is taken on: a standard error of at most 0.03."""


async def warm_start(
    model: PreTrainedModel, tokenizer: Tokenizer, sources: Sequence[Source], config: Config, tell: Callable[[WarmStart], None]
) -> None:
    """Trains on answers until exact match on the first source's held-out tasks, sampled, reaches the target.

    Waits for its own steps only, each in a thread; ended by the accuracy, by `max_steps`, or by cancellation between steps.
    """
    section = config.warm_start
    if section.target_accuracy is None:
        return
    held_out = Accuracy(model, tokenizer, sources[0].heldout[:EVALUATED_TASKS], config)  # before the trainer changes how the model attends
    schedule = Schedule(kind="constant", warmup_steps=20, total_steps=section.max_steps)
    trainer = SupervisedTrainer(model, learning_rate=section.learning_rate, schedule=schedule)
    examples = _examples(tokenizer, sources, seed=config.run.seed)
    for step in range(1, section.max_steps + 1):
        try:
            loss = await asyncio.to_thread(trainer.step, [next(examples) for _ in range(BATCH)])
        except StepSkipped:
            loss = None  # it costs the step: the weights are as they were
        accuracy = None
        if step % section.evaluate_every == 0:
            accuracy = await asyncio.to_thread(held_out.measure, seed=step)
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


class Accuracy:
    """Exact match of one sampled answer per task. Generates with a copy of the model: trainer and engine each attend in their own way."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, tasks: Sequence[Task], config: Config) -> None:
        self._model, self._tokenizer, self._tasks = model, tokenizer, tasks
        self._max_tokens, self._temperature = config.environment.max_tokens, config.environment.temperature
        self._copy = copy.deepcopy(model)
        self._engine = EmbeddedEngine(
            self._copy,
            tokenizer=tokenizer,
            name="warm-start",
            receiver=receiver(),
            record=unheard,
            max_running=max(1, len(tasks)),
            max_batch_tokens=config.engine.max_batch_tokens,
            max_context=config.model.max_context,
            pause_lease_seconds=config.engine.pause_lease_seconds,
        )

    def measure(self, *, seed: int) -> float:
        """Of the model as it is now. Blocking."""
        for name, tensor in named_tensors(self._copy).items():
            tensor.data.copy_(named_tensors(self._model)[name])
        answers = self._engine.generate_all([self._request(number, task, seed) for number, task in enumerate(self._tasks)])
        texts = [self._tokenizer.decode(answer.token_ids, skip_special=True) for answer in answers]
        return sum(exact_match(text, str(task.data["answer"])) for text, task in zip(texts, self._tasks, strict=True)) / len(self._tasks)

    def _request(self, number: int, task: Task, seed: int) -> GenerateRequest:
        ids = prompt_ids(self._tokenizer, task)
        sampling = SamplingParams(max_tokens=self._max_tokens, temperature=self._temperature, seed=seed * 1_000_003 + number)
        return GenerateRequest(f"{number:032x}", ids, len(ids), sampling)
