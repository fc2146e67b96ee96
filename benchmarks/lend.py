"""What the trainer's core brings when it generates while the trainer waits: runs with and without
`engine.lend`, in turn, on the same cores.

    python benchmarks/lend.py                         three rounds, about six minutes
    python benchmarks/lend.py --groups 4 --slots 64   what waits for a batch are its last answers,
                                                      which no engine makes sooner
    python benchmarks/lend.py --rounds 0              the first table alone

The first table is of the production code over scripted engines on virtual time, so that each has a
device of its own whatever this machine is: 16 slots, 20 ms a token, and a request that comes or
moves waits 1 ms for each token that it has, before its first. The others are of real runs. The
third kind of run has a second engine all the time, which costs the trainer its core. The model has
random weights, so answers are long. A sample is one rollout that was trained on. There are more
rollouts than one engine has slots, and a batch is several times as many.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).parent
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(HERE))

from overlap_runs import Measured, ring  # noqa: E402
from smoke import options_of  # noqa: E402

from midflight.config import Config, load_config  # noqa: E402
from midflight.environments.sources import Source  # noqa: E402
from midflight.testing.ring import SimulatedTrainer, SlowSteps, open_ring  # noqa: E402
from midflight.testing.script import Script, scripted_tokenizer  # noqa: E402
from midflight.testing.scripted import CAPABLE, ScriptedEngine  # noqa: E402
from midflight.testing.virtual_time import run_virtual  # noqa: E402
from midflight.types import Chunk, GenerateRequest, Task  # noqa: E402

if TYPE_CHECKING:
    from openai import AsyncOpenAI

VARIANTS = {
    "one engine": (),
    "and one that is lent": ("engine.lend=true",),
    "two engines": ("engine.count=2",),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each run")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them that do not count")
    parser.add_argument("--tokens", type=int, default=200, help="the longest answer")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--groups", type=int, default=16, help="of 8 rollouts, in a step")
    parser.add_argument("--slots", type=int, default=32, help="of each engine")
    parser.add_argument("--folder", type=Path, default=Path("runs/lend"))
    options = options_of(
        parser,
        rounds=1,
        steps=2,
        warmup=1,
        tokens=8,
        hidden=32,
        groups=2,
        slots=8,
        folder=Path("runs/smoke/lend"),
    )
    on_devices_of_their_own(steps=options.warmup + options.steps)
    if not options.rounds:
        return
    found: dict[str, list[Measured]] = {name: [] for name in VARIANTS}
    for number in range(options.rounds):
        for name, more in VARIANTS.items():
            found[name].append(ring(config_of(options, name, more), warmup=options.warmup))
        print(
            f"round {number + 1}: "
            + ", ".join(
                f"{name} {runs[-1].samples_per_second:.1f}/s" for name, runs in found.items()
            ),
            flush=True,
        )
    alone = [run.samples_per_second for run in found["one engine"]]
    print(
        "\n| | samples a second | of one engine, round by round | trainer waits, s a step | CPU s "
        "a step: trainer | engines | all |\n|---|---|---|---|---|---|---|"
    )
    for name, runs in found.items():
        rates = [run.samples_per_second for run in runs]
        ratios = ", ".join(f"{rate / base:.2f}" for rate, base in zip(rates, alone, strict=True))
        used = {
            part: statistics.median(
                sum(s for n, s in run.cpu.items() if n.startswith(part)) for run in runs
            )
            for part in ("trainer", "engine", "")
        }
        waits = statistics.median(
            sum(s for n, s in run.waits.items() if n.startswith("trainer")) for run in runs
        )
        print(
            (
                f"| {name} | {statistics.median(rates):.1f} | {ratios} | {waits:.1f} | "
                f"{used['trainer']:.2f} | {used['engine']:.2f} | {used['']:.2f} |"
            ),
            flush=True,
        )


class Prefilling(ScriptedEngine):
    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        await asyncio.sleep(0.001 * len(request.input_ids))
        async for chunk in super().generate(request):
            yield chunk


async def asks_once(task: Task, client: AsyncOpenAI) -> float:
    await client.completions.create(
        model="policy", prompt=str(task.data["question"]), max_tokens=200
    )
    return float(int(task.id) % 2)


async def virtual_seconds(more: tuple[str, ...], step_seconds: float, steps: int) -> float:
    """Of a run whose steps take so long."""
    sizes = (
        f"run.steps={steps}",
        "rollout.groups_per_step=8",
        "rollout.group_size=8",
        "rollout.max_staleness=2",
        "engine.max_running=16",
    )
    config = load_config(None, [*sizes, "environment.max_tokens=200", *more])
    tokenizer = scripted_tokenizer()
    script = Script(mean_length=80)
    engines = [
        Prefilling(
            f"engine{number}",
            script=script,
            capabilities=replace(CAPABLE, max_running=16),
            tokenizer=tokenizer,
            step_seconds=0.02,
            chunk_tokens=4,
        )
        for number in range(1 + bool(more))
    ]
    tasks = tuple(Task(str(number), "numbers", {"question": f"n{number}"}) for number in range(512))
    with tempfile.TemporaryDirectory() as folder:
        made = open_ring(
            config,
            engines,
            tokenizer=tokenizer,
            sources=[Source("numbers", 1.0, tasks)],
            environment=asks_once,
            folder=Path(folder),
        )
        async with made as opened:
            began = asyncio.get_running_loop().time()
            trainer = SimulatedTrainer()
            await opened.train(
                trainer, trainer, service=SlowSteps(opened.system, seconds=lambda: step_seconds)
            )
            return asyncio.get_running_loop().time() - began


def on_devices_of_their_own(*, steps: int) -> None:
    print(
        "| a step of the trainer takes | one engine: a batch in | with one that is lent | with two "
        "engines |\n|---|---|---|---|"
    )
    for step_seconds in (1.0, 2.0, 4.0):
        one, *others = (
            run_virtual(virtual_seconds(more, step_seconds, steps), max_seconds=1e6) / steps
            for more in VARIANTS.values()
        )
        print(
            (
                f"| {step_seconds:g} s | {one:.1f} s | "
                f"{' | '.join(f'{one / other:.2f} times as many' for other in others)} |"
            ),
            flush=True,
        )
    print()


def config_of(options: argparse.Namespace, name: str, more: tuple[str, ...]) -> Config:
    return load_config(
        HERE.parent / "configs" / "demo.toml",
        [
            f"run.folder={options.folder / name.replace(' ', '-')}",
            f"run.steps={options.warmup + options.steps}",
            f"model.hidden_size={options.hidden}",
            "model.max_context=512",
            f"environment.max_tokens={options.tokens}",
            "warm_start.target_accuracy=none",
            "trainer.checkpoint_every=0",
            "environment.sources.0.heldout=0",
            "environment.sources.1.heldout=0",
            f"rollout.groups_per_step={options.groups}",
            "rollout.group_size=8",
            "rollout.max_staleness=2",
            f"engine.max_running={options.slots}",
            "rollout.buffer_groups=none",
            "rollout.max_in_flight=none",
            *more,
        ],
    )


if __name__ == "__main__":
    main()
