"""Looks at the tasks of a run before it starts: whether every row is a task, how the first prompt
looks, and how long the prompts are.
"""

import os
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec
import numpy as np

from midflight import given
from midflight.config.agent import SINGLE_TURN, agent_of
from midflight.config.sources import DATASET_SIZE, SourceSection, source_names
from midflight.environments.row_tasks import RowTasks
from midflight.environments.rows import RowsSample, rows_of_entry, sample_of
from midflight.environments.sources import Source, load_sources
from midflight.errors import ConfigError, MidflightError, ModelNotFound, TaskFieldMissing
from midflight.observe.readable import duration
from midflight.run.launcher.checks.check import (
    Finding,
    Plan,
    SamplePrompt,
    SourceFindings,
    warning,
)
from midflight.run.launcher.checks.fit import memory_note, this_hardware
from midflight.run.launcher.drawing_time import DrawingTime, TakesLonger, with_few
from midflight.run.launcher.trial import TrialWait, module_answer
from midflight.text.tokenizer import Message
from midflight.types import Task

LOOKING_SECONDS = 20.0
"""The processor time for which rows are checked, all sources together. It is enough for a million
short ones. Nothing is refused for it.
"""
MEASURED = 1000
"""Prompts of a source that are tokenised, evenly from its first to its last."""
QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
"""The quantiles of the lengths of prompts that are shown."""


def sources(plan: Plan) -> Iterator[Finding]:
    """Loads all tasks of the sources, or a few of those of datasets if drawing all takes too long
    here.
    """
    sections = plan.config.environment.sources
    seed = plan.config.run.seed
    plan.doing("opens the sources of tasks")
    drawing = DrawingTime(sections, say=plan.doing)
    try:
        plan.loaded.sources = load_sources(sections, seed=seed, on_entry=drawing.drawn)
        return
    except TakesLonger:
        pass
    wanted = ", ".join(
        f"{s.dataset}: size = {s.size or DATASET_SIZE}, heldout = {s.num_heldout}"
        for s in sections
        if s.dataset
    )
    yield _note(
        f"drawing the tasks ({wanted}) takes about {duration(drawing.whole_seconds)} of "
        "processor time at every start; lower size and heldout for less. Whether there are so "
        "many is not checked."
    )
    plan.loaded.sources = load_sources([with_few(section) for section in sections], seed=seed)


def same_rows(plan: Plan) -> None:
    """Raises `ConfigError` for a function that gives other rows when it is called again, in a
    process of its own. Waits for that process as long as it moves.
    """
    environment = plan.config.environment
    sources = {source.name: source for source in plan.loaded.sources}
    for number, name in enumerate(source_names(environment.sources)):
        section = environment.sources[number]
        if section.entry is None or name not in sources:
            continue
        training = sources[name].training
        assert isinstance(training, RowTasks)
        option = f"environment.sources.{number}.entry"
        plan.doing(f"calls {section.entry} once more")
        first = sample_of(training.rows)
        later = _called_again(section, option, stall_seconds=plan.config.run.stall_seconds)
        difference = later if isinstance(later, str) else first.difference(later)
        if difference:
            raise ConfigError(
                f"{option}: {section.entry} was called twice and gave {difference}. Every process "
                "of a run calls it, so it must return the same each time: give random numbers a "
                "seed, and sort what comes from a set."
            )


def _called_again(section: SourceSection, option: str, *, stall_seconds: float) -> RowsSample | str:
    """The rows of another call. They are a text if there are none this time."""
    assert section.entry is not None
    if section.entry.startswith(f"{given.MODULE}:"):  # no other process has the object
        return sample_of(rows_of_entry(section.entry, section.options, option=option))
    answer = module_answer(
        "checks.rows_again",
        TrialWait(f"calling {section.entry} once more", stall_seconds),
        section.entry,
        option,
        environ={"PYTHONPATH": os.pathsep.join(sys.path)},
        given=msgspec.json.encode(section.options),
    )
    said = msgspec.json.decode(answer, type=RowsSample | str)
    return f"rows at first, and then none: {said}" if isinstance(said, str) else said


def columns(plan: Plan) -> None:
    """Raises `ConfigError` for a reward that asks for a column that no source has."""
    program = plan.loaded.program
    first_tasks = [source.training[0] for source in plan.loaded.sources if source.training]
    if program is not None and plan.loaded.sources:
        program.check_columns(first_tasks)


def prompt(plan: Plan) -> Iterator[Finding]:
    """Renders the first task's prompt, as the plainest environment and a warm start send it."""
    config = plan.config
    tokenizer = plan.loaded.tokenizer
    if tokenizer is None or not plan.loaded.sources:
        return
    source = plan.loaded.sources[0]
    task = source.training[0]
    try:
        text = tokenizer.render(task.messages, tools=_tools(plan), add_generation_prompt=True)
    except MidflightError as error:
        if agent_of(config.environment) != SINGLE_TURN and not config.warm_start.is_made:
            yield _note(f"chats cannot be sent to this model: {error}")
            return
        raise
    ids = tokenizer.encode(text)
    if len(ids) >= config.model.max_context:
        raise ConfigError(
            f"the prompt of task {task.id} of {source.name} has {len(ids)} tokens and "
            f"model.max_context is {config.model.max_context}, which leaves none for an "
            "answer; raise it, choose shorter tasks, or give fewer tools."
        )
    tokens = tuple((i, tokenizer.backend.id_to_token(i) or "?") for i in ids)
    plan.loaded.prompt = SamplePrompt(source.name, task.id, text, tokens)


def _tools(plan: Plan) -> Sequence[Message] | None:
    """The tools that stand in every prompt, as far as they are known before the run."""
    program = plan.loaded.program
    found = [dict(tool) for tool in program.tools] if program is not None else []
    return found or None


def rows(plan: Plan) -> Iterator[Finding]:
    """Makes every task of sources over rows, until the time is up. Raises `ConfigError` with file
    and line of the first row that makes no task.
    """
    config = plan.config
    environment = config.environment
    learns_answers = config.warm_start.is_made and config.warm_start.data is None
    compares_answers = agent_of(environment) == SINGLE_TURN and not environment.rewards
    needs_answer = compares_answers or learns_answers
    names = source_names(environment.sources)
    sections = dict(zip(names, environment.sources, strict=True))
    left = LOOKING_SECONDS
    for source in plan.loaded.sources:
        plan.doing(f"looks at the tasks of {source.name}")
        began = time.thread_time()
        total = len(source.training) + len(source.heldout)
        looked = look_at_rows(
            source, sections[source.name], needs_answer=needs_answer, seconds=left
        )
        left = max(0.5, left - (time.thread_time() - began))
        if looked < total:
            yield _note(
                f"of {source.name} the first {looked:,} of {total:,} rows were looked at in "
                f"{LOOKING_SECONDS:.0f} s of processor time: a broken one behind them ends the run "
                "when it is drawn."
            )


def look_at_rows(
    source: Source, section: SourceSection, *, needs_answer: bool, seconds: float
) -> int:
    """Returns the number of tasks that were made, which is that of all unless the processor time
    was up. With `needs_answer`, every task must have a text as `answer`.
    """
    total = len(source.training) + len(source.heldout)
    if not isinstance(source.training, RowTasks):
        return total
    began = time.thread_time()
    ids = array("q")
    looked = 0
    for looked, task in enumerate(chain(source.training, source.heldout), start=1):
        if needs_answer:
            _check_answer(source, task, looked - 1)
        if section.id:
            ids.append(hash(task.id))
        if looked % 1000 == 0 and time.thread_time() - began > seconds:
            break
    if section.id and len(np.unique(np.frombuffer(ids, np.int64))) < len(ids):
        _refuse_twice(source, section)
    return looked


def _check_answer(source: Source, task: Task, number: int) -> None:
    try:
        task.text("answer")
    except TaskFieldMissing as error:
        raise ConfigError(
            f"{_place(source, number)}: {error} The environment compares replies with a text: "
            "name its column as answer in environment.sources, which makes numbers texts."
        ) from None


def _refuse_twice(source: Source, section: SourceSection) -> None:
    seen: dict[str, int] = {}
    for number, task in enumerate(chain(source.training, source.heldout)):
        first = seen.setdefault(task.id, number)
        if first != number:
            raise ConfigError(
                f"{_place(source, number)}: column {section.id!r} is {task.id!r}, as at "
                f"{_place(source, first)}; ids must be unique within a source: correct one of "
                "them, or leave the option id out."
            )


def _place(source: Source, number: int) -> str:
    """The place at which the task with this number is written. Training tasks are counted before
    held-out ones.
    """
    tasks = source.training
    if number >= len(tasks):
        number -= len(tasks)
        tasks = source.heldout
    if isinstance(tasks, RowTasks):
        return tasks.place(number)
    return f"task {tasks[number].id} of {source.name}"


def lengths(plan: Plan) -> Iterator[Finding]:
    """Tokenises some of the prompts if the model takes chats. Raises `RequestRejected` if the chat
    template refuses one.
    """
    tokenizer = plan.loaded.tokenizer
    if tokenizer is None or plan.loaded.prompt is None:
        return
    most = plan.config.model.max_context
    tools = _tools(plan)
    for source in plan.loaded.sources:
        tasks = source.training
        step = -(-len(tasks) // MEASURED)
        measured: list[int] = []
        for number in range(0, len(tasks), step):
            messages = tasks[number].messages
            text = tokenizer.render(messages, tools=tools, add_generation_prompt=True)
            measured.append(len(tokenizer.encode(text)))
        too_long = sum(length >= most for length in measured)
        if too_long:
            yield _note(
                f"{too_long} of {len(measured)} prompts of {source.name} that were measured have "
                f"{most} tokens or more (model.max_context), which leaves none for an answer: "
                "their rollouts fail. Raise it, or remove those rows."
            )
        quantiles = np.quantile(measured, QUANTILES, method="nearest")
        plan.loaded.survey.append(
            SourceFindings(
                source.name,
                num_training=len(tasks),
                num_heldout=len(source.heldout),
                num_left_out=source.num_left_out,
                num_measured=len(measured),
                lengths=tuple(map(int, quantiles)),
            )
        )


def memory(plan: Plan) -> Iterator[Finding]:
    """Warns if the memory of the worst case, with the longest prompt, is more than there is."""
    longest = longest_prompt(plan.loaded.survey)
    try:
        note = memory_note(plan.config, this_hardware(), longest_prompt=longest)
    except ModelNotFound:  # said where model and teacher are looked for
        return
    if note is not None:
        yield _note(note)


def longest_prompt(found: Sequence[SourceFindings]) -> int | None:
    """Tokens of the longest prompt that was measured, or None if one source was not looked at."""
    if not found or not all(source.lengths for source in found):
        return None
    return max(source.lengths[-1] for source in found)


def conversations(plan: Plan) -> Iterator[Finding]:
    """Looks at the conversations of `warm_start.data`, until the time is up."""
    data = plan.config.warm_start.data
    tokenizer = plan.loaded.tokenizer
    if data is None or tokenizer is None:
        return
    from midflight.run.trainer.conversations import Conversations

    plan.doing("looks at warm_start.data")
    conversations = Conversations(data, tokenizer, max_tokens=plan.config.model.max_context)
    looked = conversations.check(seconds=LOOKING_SECONDS)
    if looked < len(conversations):
        yield _note(
            f"of warm_start.data the first {looked:,} of {len(conversations):,} conversations "
            f"were looked at in {LOOKING_SECONDS:.0f} s of processor time: a broken one behind "
            "them ends the run when it is learnt."
        )


def _note(text: str) -> Finding:
    return warning("tasks", text)
