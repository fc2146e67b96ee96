"""What the trainer's core brings when it generates while the trainer waits: runs with and without `engine.lend`, in turn, on the same cores.

    python benchmarks/lend.py                         three rounds, about four minutes
    python benchmarks/lend.py --tokens 60             answers so short that the trainer hardly waits

The third kind of run has a second engine all the time, which costs the trainer its core. The model has random weights, so answers are
long. A sample is one rollout that was trained on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(HERE))

from overlap_runs import Measured, ring  # noqa: E402
from smoke import options_of  # noqa: E402

from midflight.config import Config, load_config  # noqa: E402

VARIANTS = {"one engine": (), "and one that is lent": ("engine.lend=true",), "two engines": ("engine.count=2",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each run")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them that do not count")
    parser.add_argument("--tokens", type=int, default=200, help="the longest answer")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--folder", type=Path, default=Path("runs/lend"))
    options = options_of(parser, rounds=1, steps=2, warmup=1, tokens=8, hidden=32, folder=Path("runs/smoke/lend"))
    found: dict[str, list[Measured]] = {name: [] for name in VARIANTS}
    for number in range(options.rounds):
        for name, more in VARIANTS.items():
            found[name].append(ring(config_of(options, name, more), warmup=options.warmup))
        print(
            f"round {number + 1}: " + ", ".join(f"{name} {runs[-1].samples_per_second:.1f}/s" for name, runs in found.items()), flush=True
        )
    alone = [run.samples_per_second for run in found["one engine"]]
    print("\n| | samples a second | of one engine, round by round | trainer, CPU s a step | engines, CPU s a step |\n|---|---|---|---|---|")
    for name, runs in found.items():
        rates = [run.samples_per_second for run in runs]
        ratios = ", ".join(f"{rate / base:.2f}" for rate, base in zip(rates, alone, strict=True))
        used = {
            part: statistics.median(sum(s for n, s in run.cpu.items() if n.startswith(part)) for run in runs)
            for part in ("trainer", "engine")
        }
        print(f"| {name} | {statistics.median(rates):.1f} | {ratios} | {used['trainer']:.2f} | {used['engine']:.2f} |", flush=True)


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
            "rollout.groups_per_step=8",
            "rollout.group_size=4",
            "rollout.max_staleness=1",
            "rollout.buffer_groups=none",
            "rollout.max_in_flight=none",
            *more,
        ],
    )


if __name__ == "__main__":
    main()
