"""`midflight init --model`: the project of `midflight init` for the user's own model, with numbers
that fit it and this machine.
"""

import json
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midflight.cli import configurations
from midflight.cli.fitting import Choice, Fit, Fitting, OwnMachine, fit
from midflight.cli.project import ENVIRONMENT, REWARDS, TEST, WHOLE, word_problems
from midflight.config import Config, load_config
from midflight.config.cores import own_cores
from midflight.config.derived import machine_bytes
from midflight.errors import ConfigError
from midflight.models.gguf_folders import model_folder
from midflight.models.sizes import sizes_of
from midflight.models.tokenizers import check_tokenizer
from midflight.observe.readable import size
from midflight.run.launcher.measurements import ModelMeasurements

OWN_TASKS = "tasks.jsonl"
RUN = "run.toml"
OWN_PROMPT = "{question} Answer with the number only."
NUM_HELDOUT = 40
"""The number of the project's own tasks that are held out."""
HELDOUT_SHARE = 0.1
"""The share of the rows of a user's file that is held out."""
DATASET_HELDOUT = 64
"""The number of tasks of a dataset that are held out."""
WIDTH = 110
"""A comment's lines are at most this long."""
SHOWN = 160
"""Letters of a question and its answer that are shown."""


@dataclass(frozen=True, slots=True)
class Request:
    """The command line."""

    folder: Path
    model: Path
    tasks: str | None = None
    """A file of rows, or the name of a dataset of reasoning-gym; without it the project has tasks
    of its own.
    """
    prompt: str | None = None
    answer: str = "answer"
    rank: int | None = None


def write_fitted(request: Request, say: Callable[[str], None]) -> list[str]:
    """Measures the model, writes the project, and returns the names of its files. The folder is
    empty, or not there yet. `say` gets the results of the measurement.
    """
    folder = model_folder(request.model)
    _check_talks(folder)
    source = source_of(request)
    with tempfile.TemporaryDirectory(prefix="midflight-init-") as drafts:
        found = configurations.measured(_to_measure(request, source, Path(drafts)))
    for line in _found(found):
        say(line)
    machine = OwnMachine(own_cores(), machine_bytes())
    tasks = (Choice("environment.sources", [source]), _rewards(found.reward))
    given = Fitting(request.model.resolve(), sizes_of(folder), found, machine, tasks, request.rank)
    fitted = fit(given)
    say(_chosen(fitted, machine))
    return _write(request, fitted, found, machine)


def _check_talks(folder: Path) -> None:
    tokenizer = check_tokenizer(folder)
    if tokenizer.template is None:
        raise ConfigError(
            f"the model in {str(folder)!r} has no chat template, so that it cannot be asked "
            "anything: give an instruct model, or add chat_template.jinja to its folder."
        )
    if not tokenizer.eos_token_ids:
        raise ConfigError(
            f"no token ends an answer of the model in {str(folder)!r}: name eos_token_id in its "
            "generation_config.json."
        )


# --- The tasks ------------------------------------------------------------------------------------


def source_of(request: Request) -> dict[str, Any]:
    """Options of `[[environment.sources]]`."""
    if request.tasks is None:
        return {
            "path": OWN_TASKS,
            "prompt": request.prompt or OWN_PROMPT,
            "answer": "answer",
            "heldout": NUM_HELDOUT,
        }
    prompt = request.prompt or "{question}"
    path = Path(request.tasks)
    if path.exists():
        return {
            "path": str(path.resolve()),
            "prompt": prompt,
            "answer": request.answer,
            "heldout": HELDOUT_SHARE,
        }
    if path.suffix or len(path.parts) > 1:
        raise ConfigError(
            f"--tasks {request.tasks}: there is no such file; give JSON lines, CSV, Parquet, or a "
            "dataset of reasoning-gym."
        )
    return {"dataset": request.tasks, "prompt": prompt, "heldout": DATASET_HELDOUT}


def _to_measure(request: Request, source: dict[str, Any], drafts: Path) -> Config:
    """The defaults, with the model and the tasks. The project's own tasks lie in `drafts`, because
    there is no project yet.
    """
    if request.tasks is None:
        (drafts / OWN_TASKS).write_text(_own_tasks())
        source = {**source, "path": str(drafts / OWN_TASKS)}
    return load_config(
        None, table={"model": {"path": str(request.model)}, "environment": {"sources": [source]}}
    )


def _own_tasks() -> str:
    return "".join(json.dumps(row) + "\n" for row in word_problems(wording=WHOLE))


def _rewards(reward: str) -> Choice:
    """Returns the rewards of the run. `reward` can judge the answers. If they are numbers, an
    answer that is just a number gets a small reward too.
    """
    rewards: list[dict[str, Any]] = [{"entry": f"midflight.rewards:{reward}"}]
    if reward == "number_match":
        rewards.append({"entry": "rewards:brief", "weight": 0.1})
    return Choice("environment.rewards", rewards)


# --- What was found -------------------------------------------------------------------------------


def _found(found: ModelMeasurements) -> Iterator[str]:
    rates = ", ".join(f"{rate:.0f}" for _, rate in found.engine_rates)
    widths = ", ".join(str(width) for width, _ in found.engine_rates)
    threads = f"{found.threads} thread{'s' * (found.threads > 1)}"
    yield (
        f"measured with {threads} each, on cores of their own: engine {rates} tokens/s for "
        f"{widths} requests at once, trainer {found.trainer_rate:.0f} tokens/s"
    )
    ended = f"{len(found.ended)} ended by themselves"
    if found.ended:
        ended += f", after {found.ended[0]} to {found.ended[-1]} tokens"
    cut = f", {found.num_cut} had not ended after {found.most_tokens}" if found.num_cut else ""
    yield (
        f"of {found.num_answers} answers {found.num_right} were right ({found.reward}), "
        f"{ended}{cut}"
    )
    yield f"such as: {_short(found.question)} -> {_short(found.answer)}"
    if not found.num_right:
        yield (
            "none was right: most groups will be alike, which teaches nothing. Give easier tasks, "
            "another prompt, or a reward that is worth something on the way."
        )


def _short(text: str) -> str:
    line = " ".join(text.split())
    if len(line) > SHOWN:
        line = f"{line[: SHOWN - 1]}…"
    return repr(line)


def _chosen(fitted: Fit, machine: OwnMachine) -> str:
    config = fitted.config
    weights = "all weights" if config.lora.rank is None else f"adapters of rank {config.lora.rank}"
    start = "after a warm start" if config.warm_start.is_made else "without a warm start"
    return (
        f"chosen: {weights} at a learning rate of {config.trainer.learning_rate:g}, {start}; "
        f"{config.rollout.groups_per_step} groups of {config.rollout.group_size}, answers of at "
        f"most {config.environment.max_tokens} tokens in a context of {config.model.max_context}; "
        f"at most {size(fitted.num_bytes)} of {size(machine.memory_bytes)}, about "
        f"{fitted.step_seconds:.0f} s a step"
    )


# --- The files ------------------------------------------------------------------------------------


def _write(
    request: Request, fitted: Fit, found: ModelMeasurements, machine: OwnMachine
) -> list[str]:
    files = {
        RUN: run_file(request, fitted, found, machine),
        "rewards.py": REWARDS,
        "environment.py": ENVIRONMENT,
        "test_project.py": _test(),
    }
    if request.tasks is None:
        files[OWN_TASKS] = _own_tasks()
    request.folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (request.folder / name).write_text(text)
    return list(files)


def _test() -> str:
    """The test of the project that `midflight init` writes, without the number of its held-out
    tasks.
    """
    known = 'assert load_config("run.toml").environment.sources[0].heldout == 40'
    assert known in TEST
    return TEST.replace(known, 'assert load_config("run.toml").environment.sources[0].has_heldout')


def run_file(request: Request, fitted: Fit, found: ModelMeasurements, machine: OwnMachine) -> str:
    head = [
        "midflight train run.toml --dry-run     shows what this means, with counts, memory and one "
        "prompt as tokens",
        "midflight train run.toml               trains; here, because some paths below are "
        "relative",
        "",
        f"Written for {request.model.resolve().name} on a machine with {machine.cores} cores and "
        f"{size(machine.memory_bytes)} of memory:",
        *_found(found),
        "What stands here was chosen for that; every option may be changed, and what is left out "
        "has its default.",
    ]
    return f"{_comment(head)}\n\n{_toml(fitted.choices)}"


def _toml(choices: Sequence[Choice]) -> str:
    """The choices as TOML, with sections in the order of the choices, each with its lists of tables
    first.
    """
    sections: dict[str, list[Choice]] = {}
    for choice in choices:
        sections.setdefault(choice.option.partition(".")[0], []).append(choice)
    return "\n".join(_section(name, members) for name, members in sections.items())


def _section(name: str, choices: Sequence[Choice]) -> str:
    lines: list[str] = []
    for choice in choices:
        if isinstance(choice.value, list):
            for table in choice.value:
                lines.append(f"[[{choice.option}]]")
                lines += [f"{key} = {_value(value)}" for key, value in table.items()]
                lines.append("")
    lines.append(f"[{name}]")
    for choice in choices:
        if isinstance(choice.value, list):
            continue
        if choice.why:
            lines.append(_comment([choice.why]))
        lines.append(f"{choice.option.partition('.')[2]} = {_value(choice.value)}")
    return "\n".join(lines) + "\n"


def _comment(paragraphs: Sequence[str]) -> str:
    """Comment lines. Spaces between words stay, so that columns stay columns."""
    lines: list[str] = []
    for text in paragraphs:
        lines += textwrap.wrap(text, WIDTH, replace_whitespace=False) or [""]
    return "\n".join(f"# {line}".rstrip() for line in lines)


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
