"""Plays a configuration in this process: what the dry run accepts is written down, read back, shown, and makes a step.

The checks, the gateway, the agents, the buffer, the store and the loss are those of a run. Engines are scripted, time is virtual.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from transformers import PreTrainedModel

from midflight.cli.dry_run import report
from midflight.config import Config, load_config
from midflight.config.derived import lora_alpha, num_engines
from midflight.config.dump import as_toml
from midflight.environments.rows import rows_of_entry, sample_of
from midflight.environments.sources import Source
from midflight.errors import MidflightError
from midflight.models.creation import make_model
from midflight.models.load import load_model, save_model
from midflight.models.lora import add_adapters, lora_config
from midflight.models.names import named_tensors
from midflight.run.api.teacher import Teacher
from midflight.run.launcher import folder as run_folder
from midflight.run.launcher.checks import devices, engines, fit, folder, model, table, tasks
from midflight.run.launcher.checks.check import About, Caller, Check, Findings, Plan, TorchFound
from midflight.run.launcher.folder import prepare
from midflight.testing.ring import ScriptedScorer, SimulatedTrainer, open_ring
from midflight.testing.script import Script, scripted_tokenizer
from midflight.testing.scripted import CAPABLE, ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.trainer.trainer import PolicyTrainer, trainer_of
from midflight.types import Feature

from .drawing import Table, table_of

TOKENIZER = scripted_tokenizer()
VIRTUAL_SECONDS = 100_000.0
TRAINED = {"trainer", "objective", "correction", "critic", "lora", "model", "distillation"}
"""Sections that the real trainer reads. Without an option of theirs a simulated one makes the step."""
MOST_ROLLOUTS = 32
MOST_EPOCHS = 4


class Outcome(StrEnum):
    REFUSED = "refused"
    STEPPED = "stepped"
    VAST = "vast"
    """Accepted, and sound by all that can be seen without the time that a step takes."""
    WAITS = "waits"
    """Accepted, and nothing happens without people who post tasks, or a policy that is right now and then: groups without a difference
    are dropped, and what a script says is never the answer.
    """


# --- The place ----------------------------------------------------------------------------------------------------------


class _Answering(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None: ...


def write_files(place: Path) -> None:
    """What drawn configurations name."""
    rows = "".join(f'{{"question": "what is {n}?", "answer": "{n}", "kind": "k"}}\n' for n in range(12))
    (place / "rows.jsonl").write_text(rows)
    (place / "held.jsonl").write_text(rows)
    (place / "empty.jsonl").write_text("")
    (place / "rows.csv").write_text("question,answer,kind\n" + "".join(f"q{n},{n},k\n" for n in range(12)))
    messages = '[{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]'
    (place / "talk.jsonl").write_text(f'{{"messages": {messages}}}\n' * 16)
    python = place / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    write_byte_tokenizer(place / "model")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_context": 128}
    save_model(make_model(vocab_size=262, seed=0, dtype="float32", **sizes), place / "model")


@contextmanager
def answering() -> Generator[str]:
    """The address of a server that answers everything."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answering) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def _torch(plan: Plan) -> None:
    """It sees no GPU, and is not asked in a process of its own."""
    plan.loaded.torch = TorchFound("2.13.0", None, ())


def _trial(plan: Plan, *, meanwhile: Any = lambda: None) -> list[Any]:
    meanwhile()
    return table.ask(plan, table.IN_TRIAL)


def _called_again(section: Any, option: str, *, stall_seconds: float) -> Any:
    del stall_seconds
    return sample_of(rows_of_entry(section.entry, section.options, option=option))


@contextmanager
def checks_here() -> Generator[None]:
    """The checks are asked in this process, without those that look at the machine alone, of which a folder is told nothing either."""
    plain = [c for c in table.AT_ONCE if c.look in (model.model, model.teacher, engines.interpreter, fit.sizes, folder.run_folder)]
    beside = [c for c in table.BESIDE_TRIAL if c.look not in (devices.torch, engines.servers)]
    with (
        patch.object(table, "AT_ONCE", plain),
        patch.object(table, "BESIDE_TRIAL", [Check(_torch, About.MACHINE), *beside]),
        patch.object(table, "AT_LAST", []),
        patch.object(table, "trial", _trial),
        patch.object(tasks, "_called_again", _called_again),
        patch.object(run_folder, "machine", dict),
    ):
        yield


# --- One configuration --------------------------------------------------------------------------------------------------


def play(drawn: dict[str, Any], words: dict[str, str], place: Path) -> Outcome:
    """Plays the small configuration with these values. Raises what goes wrong after the dry run has accepted it, and whatever the checks
    raise that is no sentence.
    """
    made = table_of(drawn, words)
    try:
        config, plan, found = accepted(made)
    except MidflightError as refused:
        assert str(refused).strip(), "a refusal without a word"
        return Outcome.REFUSED
    check_kept(config)
    shown = report(config, found)
    if any(isinstance(value, str) for value in drawn.values()):  # a text may be taken for markup
        Console(file=StringIO(), width=80).print(shown, highlight=False)
    prepare(plan.folder, config, resume=False)
    if all(source.posted for source in config.environment.sources) or is_never_right(config):
        return Outcome.WAITS
    if is_vast(config):
        return Outcome.VAST
    trains = any(key.partition(".")[0] in TRAINED for key in drawn) or "environment.temperature" in drawn
    step(config, plan.loaded.sources, place, trains=trains and not config.trainer.compile)
    return Outcome.STEPPED


def accepted(made: Table) -> tuple[Config, Plan, Findings]:
    """What the dry run makes of it. Raises its refusal."""
    config = load_config(None, table=made)
    plan = Plan(config, Caller.DRY_RUN)
    return config, plan, table.checked(plan)


def check_kept(config: Config) -> None:
    """Children of a run, and the run when it goes on, read the same."""
    assert Config.model_validate_json(config.model_dump_json()) == config
    stored = Path("stored.toml")
    stored.write_text(as_toml(config))
    again = load_config(stored, note=lambda _: None)
    assert again == config


def is_never_right(config: Config) -> bool:
    environment = config.environment
    return config.rollout.drop_zero_spread and environment.entry is None and not environment.rewards


def is_vast(config: Config) -> bool:
    rollout = config.rollout
    num_asked = sum(suite.samples for suite in config.evaluation.suites)
    sizes = config.model
    return (
        rollout.groups_per_step * rollout.group_size > MOST_ROLLOUTS
        or num_engines(config.engine) > 4
        or num_asked > 8
        or config.trainer.epochs_per_step > MOST_EPOCHS
        or sizes.hidden_size > 64
        or sizes.intermediate_size > 256
        or sizes.num_layers > 4
    )


class FiniteTrainer:
    """The real trainer. After its step every weight is a number, unless it says that it skipped the step."""

    def __init__(self, trainer: PolicyTrainer) -> None:
        self._trainer = trainer

    def step(self, batch: Any) -> None:
        made = self._trainer.step(batch)
        if made.skipped is None:
            wrong = [name for name, tensor in named_tensors(self._trainer.model).items() if not tensor.isfinite().all()]
            assert not wrong, f"{wrong[0]} has numbers that are not finite"


def trainer_here(config: Config) -> FiniteTrainer:
    """It only warns: a script's log-probabilities are far from any model's."""
    warning = config.model_copy(update={"trainer": config.trainer.model_copy(update={"on_alarm": "warn"})})
    return FiniteTrainer(trainer_of(warning, _model(config)))


def _model(config: Config) -> PreTrainedModel:
    section = config.model
    if section.path is not None:
        made = load_model(section.path, dtype=section.dtype)
    else:
        made = make_model(
            vocab_size=262,
            hidden_size=section.hidden_size,
            intermediate_size=section.intermediate_size,
            num_layers=section.num_layers,
            num_heads=section.num_heads,
            num_kv_heads=section.num_kv_heads,
            max_context=section.max_context,
            seed=0,
            dtype=section.dtype,
        )
    lora = config.lora
    if lora.rank is not None:
        add_adapters(made, lora_config(made, rank=lora.rank, alpha=lora_alpha(lora), targets=lora.targets), seed=config.run.seed)
    return made


def step(config: Config, sources: Sequence[Source], place: Path, *, trains: bool) -> None:
    """Two steps, or one if the run has no more. A script keeps no record of what it sampled from, so that it samples from everything."""
    torch.manual_seed(0)
    run = config.run.model_copy(update={"steps": min(2, config.run.steps)})
    environment = config.environment.model_copy(update={"top_p": 1.0, "top_k": None, "min_p": 0.0})
    small = config.model_copy(update={"run": run, "environment": environment})
    real = trainer_here(config) if trains else None
    trainer = SimulatedTrainer(on_step=None if real is None else real.step)
    served = replace(CAPABLE, max_context=config.model.max_context, max_running=config.engine.max_running)
    if config.engine.kind == "embedded":
        served = replace(served, features=frozenset(Feature))
    engines = [
        ScriptedEngine(
            f"engine{number}",
            script=Script(mean_length=8),
            tokenizer=TOKENIZER,
            capabilities=served,
            step_seconds=1e-5,
            stage_seconds=1e-4,
            commit_seconds=1e-4,
        )
        for number in range(num_engines(config.engine))
    ]
    teacher = None
    if config.distillation.teacher is not None:
        teacher = Teacher(ScriptedScorer(), temperature=config.environment.temperature, seconds=5 * config.run.stall_seconds)
    for store in place.glob("store.sqlite*"):
        store.unlink()

    async def main() -> None:
        opened = open_ring(small, engines, tokenizer=TOKENIZER, sources=sources, environment=None, folder=place, teacher=teacher)
        async with opened as ring:
            await ring.train(trainer, trainer)

    run_virtual(main, max_seconds=VIRTUAL_SECONDS)
    assert trainer.num_steps == run.steps


def tidy(place: Path) -> None:
    """Removes what a case made."""
    for name in ("run", "a b", "deep"):
        shutil.rmtree(place / name, ignore_errors=True)
