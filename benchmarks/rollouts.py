"""CPU of the rollout process for one single-turn rollout, all of it: tasks, groups, session,
gateway, engine's wire, books, store, journal.

    python benchmarks/rollouts.py [--rollouts 20000] [--in-flight 128] [--answer 8]

The process is assembled as in a run (`RolloutSystem`, the built-in environment, its observers,
uvloop, the collector's threshold). The engine is that of `gateway_sides.py`: a process of its own,
which answers at once over the engine's wire. In the trainer's place is one that gives every batch
back. CPU is this process's, threads included, from a steady state on.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path

import uvloop
from smoke import options_of

from gateway import HERE, free_port, running, wait_for
from midflight.config import Config, load_config
from midflight.engines.remote import RemoteEngine
from midflight.environments.single_turn import LocalAnswers
from midflight.environments.sources import load_sources
from midflight.gateway.http.chats import InProcessChats
from midflight.observe.journal import Journal
from midflight.observe.observers import Observers
from midflight.observe.prometheus import Metrics
from midflight.observe.run_state import RunState
from midflight.run.launcher.child import GC_THRESHOLD
from midflight.run.parts import serve_while
from midflight.run.rollout.rollout_process import frequent
from midflight.run.rollout.serving import Agents, Serving
from midflight.run.rollout.system import RolloutSystem, accounts
from midflight.testing.ring import PhaseLog
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.trajectories.store import Store
from midflight.types import WeightManifest
from midflight.types.facts import Stepped

CHECKPOINT_EVERY = 20
"""Versions, as in a run: what was trained up to one need not be remembered any more."""


def config_of(options: argparse.Namespace, folder: Path) -> Config:
    """The demo's, from a model that needs no warm start."""
    return load_config(
        HERE.parent / "configs" / "demo.toml",
        [
            f"run.folder={folder}",
            f"environment.max_tokens={options.answer}",
            f"rollout.max_in_flight={options.in_flight}",
            "rollout.max_staleness=8",
            "rollout.buffer_groups=none",
            "warm_start.target_accuracy=none",
            "environment.sources.0.heldout=0",
            "environment.sources.1.heldout=0",
        ],
    )


async def measured(
    options: argparse.Namespace, config: Config, engine_port: int, folder: Path
) -> list[float]:
    """CPU milliseconds a rollout, of each round."""
    state = RunState(name="run", steps=0, start_version=0, slots=options.in_flight)
    metrics = Metrics()
    observers = [state.apply, metrics.apply, Journal(folder / "metrics.jsonl", state).apply]
    record = Observers(observers, of=frequent(state, metrics)).apply
    remote = RemoteEngine("trivial", f"http://127.0.0.1:{engine_port}", token=None, record=record)
    found: list[float] = []

    async def main() -> None:
        await remote.connect(seconds=30)
        write_byte_tokenizer(folder)
        serving = Serving(
            config, Tokenizer.load(folder), [remote], record=record, version=0, anonymous=False
        )
        host = LocalAnswers(InProcessChats(serving.gateway))
        sources = load_sources(config.environment.sources, seed=0)
        store = Store(folder / "store.sqlite", run="run")
        system = RolloutSystem(
            Agents(config, serving, host, record), sources=sources, store=store, phases=PhaseLog()
        )
        state.accounts = metrics.accounts = lambda: accounts(system.books)
        await serve_while(give_back(system, options, config, found), system.run())

    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    await serve_while(main(), remote.run())
    return found


async def give_back(
    system: RolloutSystem, options: argparse.Namespace, config: Config, found: list[float]
) -> None:
    """Waits for batches and ends when enough were measured. The first round warms up."""
    size = config.rollout.groups_per_step * config.rollout.group_size
    version = 0
    for _ in range(options.rounds + 1):
        began = time.process_time()
        first = version
        while (version - first) * size < options.rollouts:
            batch = await system.take(version)
            version += 1
            await system.done(Stepped(batch.lease, version, began, began, num_tokens=0, metrics={}))
            await system.publish(
                WeightManifest(version, f"weights {version}", "file", "nowhere", ())
            )
            if version % CHECKPOINT_EVERY == 0:
                await system.checkpointed(version)
        found.append((time.process_time() - began) / ((version - first) * size) * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=4000, help="in each round")
    parser.add_argument("--in-flight", type=int, default=128)
    parser.add_argument("--answer", type=int, default=8, help="tokens of each answer")
    options = options_of(parser, rounds=1, rollouts=128)
    port = free_port()
    with (
        running([sys.executable, HERE / "gateway_sides.py", "engine", str(port), "0"]) as engine,
        tempfile.TemporaryDirectory() as folder,
    ):
        wait_for(port, engine)
        config = config_of(options, Path(folder))
        found = uvloop.run(measured(options, config, port, Path(folder)))
    print(
        f"{statistics.median(found[1:]):.3f} ms CPU a rollout of {options.answer} tokens "
        f"({min(found[1:]):.3f}-{max(found[1:]):.3f})"
    )


if __name__ == "__main__":
    main()
