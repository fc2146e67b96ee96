"""An embedded engine's process: a model, the decode loop, and the wire, on a socket that the
launcher holds.
"""

import asyncio
import socket
from functools import partial
from pathlib import Path

from midflight.config.derived import served_dtype
from midflight.config.sections import Config
from midflight.config.weights import WeightsSection
from midflight.engines.app import build_app
from midflight.engines.embedded.engine import PAUSE_LEASE_SECONDS, EmbeddedEngine
from midflight.engines.embedded.prefixes import PrefixRoom
from midflight.engines.introduction import about_route
from midflight.engines.relay import relay_steps
from midflight.models.load import load_model
from midflight.run.device_lock import LockedSleeper, device_lock
from midflight.run.heartbeat import START_SECONDS
from midflight.run.parts import (
    TEACHER,
    EngineSpec,
    FirstWork,
    LauncherPipe,
    Notice,
    Ready,
    serve_while,
)
from midflight.text.tokenizer import Tokenizer
from midflight.types.facts import record_nothing
from midflight.weights.transports.select import receiver
from midflight.wire.server import serve_app

SPEAKERS = ("engine0", "teacher")
"""Engines that warn if their model is slow. The others serve the same model as the first."""


def lease_seconds(weights: WeightsSection) -> float:
    """Returns the time after which a paused engine resumes by itself. A commit has ended by then.
    In a barrier an engine may wait for another in each of three phases.
    """
    phases = 4 if weights.commit == "barrier" else 1
    return max(PAUSE_LEASE_SECONDS, phases * weights.commit_seconds)


def make_engine(config: Config, model: Path, *, name: str, version: int) -> EmbeddedEngine:
    section = config.engine
    return EmbeddedEngine(
        load_model(model, dtype=served_dtype(config), device=section.device),
        tokenizer=Tokenizer.load(model),
        name=name,
        receiver=receiver(stage_seconds=config.weights.stage_seconds),
        record=record_nothing,
        max_running=section.max_running,
        max_batch_tokens=section.max_batch_tokens,
        max_context=config.model.max_context,
        pause_lease_seconds=lease_seconds(config.weights),
        version=version,
        prefixes=PrefixRoom(section.prefix_mb * 2**20, section.prefix_age),
        records_experts=config.correction.routing_replay,
        guesses=section.guesses,
        packs=True,
    )


async def run_engine(spec: EngineSpec, launcher: LauncherPipe) -> None:
    """Decodes and serves until the launcher ends it, or the decode loop crashes."""
    config = Config.model_validate_json(spec.config)
    lock = None if spec.name == TEACHER else device_lock(config, alone=False)
    if lock is not None:
        with launcher.heartbeat.doing("waits until the trainer has left its device"):
            await lock.take()
    with launcher.heartbeat.doing(
        "loads its model", limit=START_SECONDS, heavy=True, computes=True
    ):
        engine = await asyncio.to_thread(
            make_engine, config, Path(spec.model), name=spec.name, version=spec.version
        )
    if engine.warning and spec.name in SPEAKERS:
        launcher.tell(Notice(f"{spec.name}: {engine.warning}"))
    about = about_route(engine, Path(spec.model))
    worked = FirstWork(launcher)
    app = build_app(
        engine,
        partial(relay_steps, worked=worked),
        token=spec.token,
        scorer=engine,
        sleeper=None if lock is None else LockedSleeper(engine, lock),
        beside=[about],
        worked=worked,
    )
    with socket.socket(fileno=spec.socket_fd) as listener:
        server = serve_app(app, listener, ready=lambda: launcher.tell(Ready()))
        await serve_while(engine.run(), server)
