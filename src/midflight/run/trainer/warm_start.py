"""The warm start: supervised learning of answers, or of conversations, before a ring starts. A
model of random weights learns here to write an answer, or a call of a tool, so that there is
something to reward.
"""

import asyncio
import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

from transformers import PreTrainedModel

from midflight.config.sections import Config
from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.embedded.prefixes import PrefixRoom
from midflight.environments.single_turn import exact_match
from midflight.environments.sources import Source, load_sources
from midflight.errors import StepSkipped
from midflight.models.names import named_tensors
from midflight.run.parts import WarmStart
from midflight.run.trainer.conversations import Conversations
from midflight.text.tokenizer import Tokenizer
from midflight.trainer.model.microbatch import Example, Layout
from midflight.trainer.schedule import Schedule
from midflight.trainer.supervised import SupervisedTrainer
from midflight.types import GenerateRequest, SamplingParams, Task
from midflight.types.facts import record_nothing
from midflight.weights.transports.select import receiver

EVALUATED = 256
"""The number of examples that the accuracy is measured on: a standard error of at most 0.03."""
SCREENED = 64
"""The number of those that are tried first: a standard error of at most 0.0625."""
FAR = 0.19
"""Three standard errors. If the accuracy on the first answers is so far below the target, it is
returned at once: the others would not bring it there.
"""


@dataclass(frozen=True, slots=True)
class WarmStartData:
    """Endless examples to learn from, and those that the accuracy is measured on."""

    tokenizer: Tokenizer
    examples: Iterator[Example]
    heldout: Sequence[Example]


def warm_start_data(config: Config, tokenizer: Tokenizer) -> WarmStartData:
    """Takes the conversations that the configuration names, else its tasks. It blocks. Raises
    `ConfigError` with their faults.
    """
    section = config.warm_start
    seed = config.run.seed
    if section.data is None:
        sources = load_sources(config.environment.sources, seed=seed)
        heldout = [_answered(tokenizer, task) for task in sources[0].heldout[:EVALUATED]]
        return WarmStartData(tokenizer, _examples(tokenizer, sources, seed=seed), heldout)
    conversations = Conversations(section.data, tokenizer, max_tokens=config.model.max_context)
    every = 0 if section.target_accuracy is None else 8
    learnt, apart = conversations.split(seed=seed, every=every)
    heldout: list[Example] = []
    for number in apart:
        heldout += conversations.turns(number)
    examples = _turns(conversations, learnt, random.Random(seed))
    return WarmStartData(tokenizer, examples, heldout[:EVALUATED])


async def warm_start(
    model: PreTrainedModel,
    lessons: WarmStartData,
    config: Config,
    tell: Callable[[WarmStart], None],
    *,
    layout: Layout = Layout.PACKED,
) -> None:
    """Trains on the examples until exact match on the held-out ones, sampled, reaches the target.

    Steps go on while the accuracy of earlier weights is measured. If it reaches the target, those
    weights are put back: the model is the same as if the steps had waited.

    Waits for its own steps and measurements, each in a thread; ended by the accuracy, by
    `max_steps`, or by cancellation between steps.
    """
    section = config.warm_start
    target = config.warm_start.target_accuracy
    # before the trainer changes how the model attends
    held_out = None if target is None else Accuracy(model, lessons, config)
    schedule = Schedule(kind="constant", warmup_steps=20, total_steps=section.max_steps)
    trainer = SupervisedTrainer(
        model,
        learning_rate=section.learning_rate,
        schedule=schedule,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        layout=layout,
    )
    loss = None
    accuracy = None
    measured = cast("asyncio.Task[float] | None", None)
    async with asyncio.TaskGroup() as beside:
        for step in range(1, section.max_steps + 1):
            examples = list(islice(lessons.examples, section.examples_per_step))
            try:
                loss = await asyncio.to_thread(trainer.step, examples)
            except StepSkipped:
                loss = None  # it costs the step: the weights are as they were
            is_due = step % section.evaluate_every == 0
            accuracy = None
            if measured is not None and (is_due or measured.done()):
                accuracy = await measured
                measured = None
            tell(WarmStart(step, loss, accuracy))
            if accuracy is not None and target is not None and accuracy >= target:
                break
            if held_out is not None and is_due:
                held_out.take()
                measured = beside.create_task(asyncio.to_thread(held_out.measure, seed=step))
    if measured is not None:
        accuracy = measured.result()
        tell(WarmStart(section.max_steps, loss, accuracy))
    if held_out is not None and target is not None and accuracy is not None and accuracy >= target:
        held_out.put_back()


def _answered(tokenizer: Tokenizer, task: Task) -> Example:
    """The prompt of a single-turn agent's request for the task, and the task's answer with the end
    of a message.
    """
    prompt = tokenizer.encode(tokenizer.render(task.messages, add_generation_prompt=True))
    answer = tokenizer.encode(task.text("answer"))
    return prompt, (*answer, min(tokenizer.eos_token_ids))


def _examples(tokenizer: Tokenizer, sources: Sequence[Source], *, seed: int) -> Iterator[Example]:
    """Endless examples, sources by weight, tasks in seeded order without replacement within a
    source's epoch.
    """
    draw = random.Random(seed)
    epochs = [
        _epochs(source.training, random.Random(f"{seed}/{source.name}")) for source in sources
    ]
    weights = [source.weight for source in sources]
    while True:
        (epoch,) = draw.choices(epochs, weights)
        yield _answered(tokenizer, next(epoch))


def _epochs(tasks: Sequence[Task], order: random.Random) -> Iterator[Task]:
    while True:
        for place in order.sample(range(len(tasks)), len(tasks)):
            yield tasks[place]


def _turns(
    conversations: Conversations, learnt: Sequence[int], order: random.Random
) -> Iterator[Example]:
    """Endless turns; those of one conversation come together."""
    while True:
        for number in order.sample(learnt, len(learnt)):
            yield from conversations.turns(number)


def _copy(source: PreTrainedModel, target: PreTrainedModel) -> None:
    values = named_tensors(source)
    for name, tensor in named_tensors(target).items():
        tensor.copy_(values[name])


class Accuracy:
    """Exact match of one sampled answer per example. Generates with a copy of the model: trainer
    and engine each attend in their own way.
    """

    def __init__(self, model: PreTrainedModel, lessons: WarmStartData, config: Config) -> None:
        self._model = model
        self._tokenizer = lessons.tokenizer
        self._examples = lessons.heldout
        if config.warm_start.data is None:
            self._max_tokens = config.environment.max_tokens
        else:
            self._max_tokens = max((len(answer) for _, answer in lessons.heldout), default=0)
        self._temperature = config.environment.temperature
        self._target = config.warm_start.target_accuracy or 0.0
        self._copy = copy.deepcopy(model)
        self._engine = EmbeddedEngine(
            self._copy,
            tokenizer=lessons.tokenizer,
            name="warm-start",
            receiver=receiver(),
            record=record_nothing,
            max_running=max(1, len(lessons.heldout)),
            max_batch_tokens=config.engine.max_batch_tokens,
            max_context=config.model.max_context,
            prefixes=PrefixRoom(0),  # its weights change under it
        )

    def take(self) -> None:
        """Copies the weights as they are now, to `measure` them. Must not be called meanwhile."""
        _copy(self._model, self._copy)

    def put_back(self) -> None:
        """Gives the model the weights that were taken."""
        _copy(self._copy, self._model)

    def measure(self, *, seed: int) -> float:
        """Returns the accuracy of the weights that were taken. It uses a part of the examples if
        that is enough. It blocks.
        """
        exact = self._exact(0, SCREENED, seed=seed)
        if len(self._examples) <= SCREENED or sum(exact) / SCREENED < self._target - FAR:
            return sum(exact) / len(exact)
        exact += self._exact(SCREENED, len(self._examples), seed=seed)
        return sum(exact) / len(exact)

    def _exact(self, start: int, end: int, *, seed: int) -> list[float]:
        examples = self._examples[start:end]
        asked = [
            self._request(start + number, prompt, seed)
            for number, (prompt, _) in enumerate(examples)
        ]
        answers = self._engine.generate_all(asked)
        return [
            exact_match(self._text(given.token_ids), self._text(wanted))
            for given, (_, wanted) in zip(answers, examples, strict=True)
        ]

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special=True)

    def _request(self, number: int, prompt: Sequence[int], seed: int) -> GenerateRequest:
        sampling = SamplingParams(
            max_tokens=self._max_tokens,
            temperature=self._temperature,
            seed=seed * 1_000_003 + number,
        )
        return GenerateRequest(f"{number:032x}", tuple(prompt), len(prompt), sampling)
