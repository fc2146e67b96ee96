"""What `engine.deterministic` does to the mismatch of engine and trainer: the same run without and
with it, in turns.

    python benchmarks/deterministic.py --engine vllm --python .venv-vllm/bin/python \\
        [--device cuda] [--dtype bfloat16] [--steps 20] [--rounds 3]

Without it, what shares a step with a token changes how the token's sums are rounded; with it, only
that the trainer's kernels are other ones is left. It takes a GPU, because the servers have such
kernels there alone: on a CPU the run without it is all there is, and the table says so. The
mismatch is that of tokens whose keys are of one version (`mismatch/same_keys`), in nats, the mean
of the steps; tokens/s of generation.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from smoke import SETTINGS, options_of

CONFIG = Path(__file__).parents[1] / "configs" / "demo.toml"
READINGS = tuple(f"mismatch/same_keys/{name}" for name in ("mean", "max", "k3"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("embedded", "vllm", "sglang"), default="vllm")
    parser.add_argument("--python", help="the server's interpreter")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="of the server; default: the configuration's")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = options_of(parser, engine="embedded", steps=3, rounds=1)
    can = options.device != "cpu" and options.engine != "embedded"
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    for number in range(options.rounds):
        for deterministic in ((False, True), (True, False))[number % 2] if can else (False,):
            found[deterministic].append(measured(options, deterministic=deterministic))
    print(
        f"{options.engine} on {options.device}, {options.steps} steps, median of {options.rounds}\n"
    )
    print("| engine.deterministic | mean | max | k3 | tokens/s |\n|---|---|---|---|---|")
    for deterministic, rows in found.items():
        cells = (
            [f"{statistics.median(column):.2e}" for column in zip(*rows, strict=True)]
            if rows
            else ["not run: it takes a GPU and a server", "", "", ""]
        )
        print(f"| {str(deterministic).lower()} | {' | '.join(cells)} |")


def measured(options: argparse.Namespace, *, deterministic: bool) -> list[float]:
    """Mean over the steps of each reading, then generated tokens per second."""
    settings = {
        "engine.kind": options.engine,
        "engine.device": options.device,
        "engine.deterministic": str(deterministic).lower(),
        "engine.python": options.python,
        "engine.dtype": options.dtype,
        "run.steps": options.steps,
        "evaluation.eval_every": 0,
        "warm_start.target_accuracy": 0.05,
    }
    sets = [f"{key}={value}" for key, value in settings.items() if value is not None] + (
        list(SETTINGS) if options.smoke else []
    )
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "run"
        command = [
            sys.executable,
            "-m",
            "midflight",
            "train",
            CONFIG,
            "--folder",
            folder,
            *(word for each in sets for word in ("--set", each)),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(
                f"the run ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    readings = [
        statistics.mean(step["trainer"][name] for step in steps if name in step["trainer"])
        for name in READINGS
    ]
    return [*readings, statistics.mean(step["generation_rate"] for step in steps)]


if __name__ == "__main__":
    main()
