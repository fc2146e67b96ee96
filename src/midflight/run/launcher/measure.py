"""A short measurement of a model: how it answers the tasks of a project, and how quickly engine and
trainer compute on this machine.

    python -m midflight.run.launcher.measure THREADS

It reads a configuration from standard input, and writes `ModelMeasurements` as JSON, or a text with
the error. It is bounded by work, not by the clock: it takes a fixed number of tokens, fewer for a
larger model.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from midflight.config.sections import Config
from midflight.engines.embedded.engine import EmbeddedEngine, Generated
from midflight.environments.sources import Source, load_sources
from midflight.errors import ConfigError, EnvironmentFailed, MidflightError
from midflight.models.load import load_model
from midflight.models.sizes import sizes_of
from midflight.models.tokenizers import check_tokenizer
from midflight.rewards import exact_match, number_match
from midflight.run.launcher.drawing_time import with_few
from midflight.run.launcher.measurements import ENDED_SHARE, WIDTHS, ModelMeasurements
from midflight.run.launcher.trial import TrialReport, trying
from midflight.text.tokenizer import Tokenizer
from midflight.trainer.model.microbatch import Example, answer_predictions, split
from midflight.trainer.model.policy import Policy
from midflight.trainer.model.probe import proven_layout
from midflight.types import GenerateRequest, SamplingParams, Task
from midflight.types.facts import record_nothing
from midflight.weights.transports.select import receiver

WORK = 17_000_000_000
"""Parameters times steps of the engine, or times tokens of the trainer. Each takes some seconds on a
slow core. A model of 135 million parameters gets 126 steps.
"""
FIRST_TOKENS = 64
"""The tokens that an answer may have at first."""
MOST_TOKENS = 512
"""The most tokens of an answer, for a small model too."""
LEAST_TOKENS = 32
"""The tokens that an answer may always have, for a large model too."""
TRAINED_TOKENS = 512
"""The most tokens on which the trainer is measured."""
SPEED_STEPS = 8
"""The steps on which the engine is measured for each number of requests."""
NUM_TASKS = 16
"""The number of tasks that the model is asked."""
NUM_LOOKED = 256
"""The number of prompts whose length is taken."""
SPEED_PROMPT = 8
"""Tokens of a prompt that only measures speed."""
SPEED_ROW = 32
"""Tokens of a row that only measures speed."""


@dataclass(frozen=True, slots=True)
class Questions:
    """Some tasks of a project, and their prompts as tokens."""

    tasks: tuple[Task, ...]
    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    """The lengths of these and more prompts, the shortest first."""


class Measurement:
    """Measures one model. Its methods block, and report their progress."""

    def __init__(self, config: Config, trial: TrialReport, *, threads: int) -> None:
        assert config.model.path is not None
        self._config = config
        self._trial = trial
        self._threads = threads
        self._folder = config.model.path
        self._num_parameters = sizes_of(self._folder).num_parameters
        torch.set_num_threads(threads)

    def measured(self) -> ModelMeasurements:
        """Raises `MidflightError` if the model cannot be asked, or the tasks cannot be read."""
        tokenizer = check_tokenizer(self._folder)
        questions = self._questions(tokenizer)
        trainer_rate = self._trainer_rate()
        engine = self._engine(tokenizer, longest=questions.lengths[-1])
        rates = tuple((width, self._engine_rate(engine, width)) for width in WIDTHS)
        answers, most = self._answers(engine, questions)
        texts = [tokenizer.decode(answer.token_ids, skip_special=True) for answer in answers]
        ended = sorted(
            len(answer.token_ids) for answer in answers if answer.finish.reason != "length"
        )
        reward = _reward_of(questions.tasks)
        return ModelMeasurements(
            threads=self._threads,
            prompt_length=questions.lengths[len(questions.lengths) // 2],
            longest_prompt=questions.lengths[-1],
            ended=tuple(ended),
            num_cut=len(answers) - len(ended),
            most_tokens=most,
            num_right=sum(
                _is_right(text, task, reward)
                for text, task in zip(texts, questions.tasks, strict=True)
            ),
            reward=reward,
            closes=_closes(tokenizer),
            question=str(questions.tasks[0].messages[-1].get("content", "")),
            answer=texts[0],
            engine_rates=rates,
            trainer_rate=trainer_rate,
        )

    # --- What is asked ----------------------------------------------------------------------------

    def _questions(self, tokenizer: Tokenizer) -> Questions:
        self._trial.doing("opens the tasks")
        sections = [with_few(section) for section in self._config.environment.sources]
        (source,) = load_sources(sections, seed=self._config.run.seed)
        looked = _evenly(source, NUM_LOOKED)
        prompts = [
            tokenizer.encode(tokenizer.render(task.messages, add_generation_prompt=True))
            for task in looked
        ]
        chosen = range(0, len(looked), max(1, len(looked) // NUM_TASKS))[:NUM_TASKS]
        lengths = tuple(sorted(map(len, prompts)))
        context = self._config.model.max_context
        if lengths[-1] + LEAST_TOKENS > context:
            raise ConfigError(
                f"the longest of {len(prompts)} prompts of {source.name} has {lengths[-1]} tokens, "
                f"and the model can {context} with the answer: give tasks with prompts of at most "
                f"{context - LEAST_TOKENS}."
            )
        return Questions(
            tuple(looked[i] for i in chosen), tuple(prompts[i] for i in chosen), lengths
        )

    # --- How quickly ------------------------------------------------------------------------------

    def _trainer_rate(self) -> float:
        """Tokens a second. The trainer loads the model anew, because trainer and engine each change
        how it attends.
        """
        self._trial.doing("measures the trainer")
        model = load_model(self._folder, dtype=self._config.model.dtype)
        layout, proof = proven_layout(model, max_context=self._config.model.max_context)
        if not proof.is_right:
            raise ConfigError(proof.reason)
        policy = Policy(model, layout)
        tokens = max(2 * SPEED_ROW, min(TRAINED_TOKENS, WORK // self._num_parameters))
        rows = [self._row(number) for number in range(tokens // SPEED_ROW)]
        self._backward(policy, rows[:1])
        return SPEED_ROW * len(rows) / self._seconds(lambda: self._backward(policy, rows))

    def _seconds(self, work: Callable[[], object]) -> float:
        """The seconds that this process computes for `work`, divided by its threads. The work of
        other programs on the same cores does not count.
        """
        began = time.process_time()
        work()
        return (time.process_time() - began) / self._threads

    def _row(self, seed: int) -> Example:
        """Random tokens, so that no two rows begin alike."""
        draw = random.Random(seed)
        ids = [draw.randrange(sizes_of(self._folder).vocab_size) for _ in range(SPEED_ROW)]
        return ids[: SPEED_ROW // 2], ids[SPEED_ROW // 2 :]

    def _backward(self, policy: Policy, rows: Sequence[Example]) -> None:
        predictions = answer_predictions(rows)
        every = np.arange(len(predictions.targets))
        cpu = torch.device("cpu")
        micros = split(predictions, every, budget=TRAINED_TOKENS, device=cpu, layout=policy.layout)
        for micro in micros:
            torch.autograd.backward(-policy(micro, temperature=1.0)[0].sum())

    def _engine(self, tokenizer: Tokenizer, *, longest: int) -> EmbeddedEngine:
        self._trial.doing("measures the engine")
        return EmbeddedEngine(
            load_model(self._folder, dtype=self._config.model.dtype),
            tokenizer=tokenizer,
            name="measured",
            receiver=receiver(),
            record=record_nothing,
            max_running=max(WIDTHS),
            max_batch_tokens=self._config.engine.max_batch_tokens,
            max_context=min(self._config.model.max_context, longest + MOST_TOKENS),
            packs=True,
        )

    def _engine_rate(self, engine: EmbeddedEngine, width: int) -> float:
        """Output tokens a second of so many requests that are decoded together, their prompts left
        out.
        """
        steps = max(2, min(SPEED_STEPS, WORK // self._num_parameters // len(WIDTHS)))
        prompts = [self._row(1000 * width + number)[0][:SPEED_PROMPT] for number in range(width)]
        prompted = self._seconds(lambda: engine.generate_all(_requests(prompts, 1)))
        # of the same length, and nothing of them is kept
        others = [prompt[::-1] for prompt in prompts]
        decoded = self._seconds(lambda: engine.generate_all(_requests(others, 1 + steps)))
        return width * steps / max(1e-9, decoded - prompted)

    # --- How it answers ---------------------------------------------------------------------------

    def _answers(self, engine: EmbeddedEngine, questions: Questions) -> tuple[list[Generated], int]:
        """The answer to each question, and how many tokens an answer could have. These double until
        nearly all answers have ended.
        """
        room = engine.capabilities.max_context - questions.lengths[-1]
        limit = min(room, MOST_TOKENS, max(LEAST_TOKENS, WORK // self._num_parameters))
        most = min(FIRST_TOKENS, limit)
        answers: list[Generated | None] = [None] * len(questions.prompts)
        while True:
            self._trial.doing(f"asks {len(answers)} questions, answers of at most {most} tokens")
            answers = self._longer(engine, questions, answers, most)
            found = [answer for answer in answers if answer is not None]
            num_ended = sum(answer.finish.reason != "length" for answer in found)
            if most >= limit or num_ended >= ENDED_SHARE * len(found):
                return found, most
            most = min(limit, 2 * most)

    def _longer(
        self,
        engine: EmbeddedEngine,
        questions: Questions,
        answers: Sequence[Generated | None],
        most: int,
    ) -> list[Generated | None]:
        """Answers that go on where they were cut."""
        # tokens of the answers that have not ended, by the number of their question
        before: dict[int, tuple[int, ...]] = {}
        for i, answer in enumerate(answers):
            if answer is None:
                before[i] = ()
            elif answer.finish.reason == "length":
                before[i] = answer.token_ids
        temperature = self._config.environment.temperature
        requests = [
            GenerateRequest(
                f"{i:032x}",
                (*questions.prompts[i], *token_ids),
                len(questions.prompts[i]),
                SamplingParams(max_tokens=most, temperature=temperature, seed=i),
            )
            for i, token_ids in before.items()
        ]
        longer = list(answers)
        for i, answer in zip(before, engine.generate_all(requests), strict=True):
            longer[i] = _joined(before[i], answer)
        return longer


def _requests(prompts: Sequence[Sequence[int]], tokens: int) -> list[GenerateRequest]:
    """Returns requests whose answers have exactly `tokens` tokens."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [
        GenerateRequest(f"{number:032x}", tuple(prompt), len(prompt), sampling)
        for number, prompt in enumerate(prompts)
    ]


def _joined(before: tuple[int, ...], answer: Generated) -> Generated:
    """The answer with the tokens before it. Callers look at its tokens and its end alone."""
    return Generated((*before, *answer.token_ids), (), (), (), answer.finish)


def _evenly(source: Source, number: int) -> list[Task]:
    tasks = source.training
    return [tasks[i] for i in range(0, len(tasks), -(-len(tasks) // number))]


def _reward_of(tasks: Sequence[Task]) -> str:
    """The reward that can judge the answers of these tasks."""
    answers = [str(task.data.get("answer", "")).strip() for task in tasks]
    are_numbers = all(_is_number(answer) for answer in answers)
    return "number_match" if are_numbers else "exact_match"


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", ""))
    except ValueError:
        return False
    return True


def _is_right(said: str, task: Task, reward: str) -> bool:
    answer = task.data.get("answer")
    if not isinstance(answer, str):
        return False
    judge = number_match if reward == "number_match" else exact_match
    try:
        return judge(said, answer) == 1.0
    except EnvironmentFailed:
        return False


def _closes(tokenizer: Tokenizer) -> bool:
    """True if the template closes an answer with a token that ends it."""
    whole = tokenizer.render(
        [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "two"}]
    )
    behind = tokenizer.encode(whole.rpartition("two")[2])
    return bool(set(behind[:1]) & tokenizer.eos_token_ids)


def main() -> None:
    with trying() as trial:
        config = Config.model_validate_json(sys.stdin.read())
        try:
            measurement = Measurement(config, trial, threads=int(sys.argv[1]))
            found: ModelMeasurements | str = measurement.measured()
        except MidflightError as error:
            found = str(error)
        trial.answer(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
