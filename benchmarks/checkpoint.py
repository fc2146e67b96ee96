"""How long a checkpoint holds the trainer: the copy that the loop waits for, beside the whole save
that it would wait for otherwise.

Two models with moments, one rank, float32: the demo's and one of a hundred million parameters.
Saves alternate between the two ways; numbers are medians. The disk under `--folder` decides much of
the second. `stall` is the longest time that a thread beside the write did not get the interpreter:
a write that holds its lock would hold the steps as well.

    python benchmarks/checkpoint.py [--rounds 5] [--folder DIR]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from smoke import options_of

from midflight.models.creation import make_model
from midflight.trainer.checkpoint import stage
from midflight.trainer.credit import Scoring
from midflight.trainer.objective import Objective
from midflight.trainer.optimizer import Adam, named_parameters
from midflight.trainer.schedule import Schedule
from midflight.trainer.trainer import PolicyTrainer

SIZES = {"demo": (128, 384, 4, 262), "100 M": (768, 2048, 12, 16384)}
"""Width, width of the feed-forward layers, depth, vocabulary."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    options = options_of(parser, rounds=1, models=["demo"])
    print(
        "| model | MB | held by the whole save | held by the copy | ratio | write beside the steps "
        "| stall |\n|---|---|---|---|---|---|---|"
    )
    for name in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(row(name, trainer(*SIZES[name]), Path(folder), rounds=options.rounds))


def trainer(width: int, inner: int, depth: int, vocabulary: int) -> PolicyTrainer:
    """With moments, from gradients that nobody made."""
    model = make_model(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_layers=depth,
        num_heads=4,
        num_kv_heads=2,
        max_context=256,
        seed=0,
        dtype="float32",
    )
    made = PolicyTrainer(
        model, Objective(), scoring=Scoring(), schedule=Schedule(), adam=Adam(learning_rate=1e-4)
    )
    for _, parameter in named_parameters(model):
        parameter.grad = torch.randn_like(parameter)
    made.optimizer.step()
    return made


def row(name: str, ours: PolicyTrainer, folder: Path, *, rounds: int) -> str:
    whole = []
    copied = []
    written = []
    stalls = []
    num_bytes = sum(t.nbytes for t in stage(ours, cursor="").tensors.values())
    for _ in range(rounds):
        ours.version += 1
        began = time.perf_counter()
        stage(ours, cursor="").write(folder, keep=1)
        whole.append(time.perf_counter() - began)
        began = time.perf_counter()
        copy = stage(ours, cursor="")
        copied.append(time.perf_counter() - began)
        with Ticks() as ticks:
            began = time.perf_counter()
            copy.write(folder, keep=1)
            written.append(time.perf_counter() - began)
        stalls.append(ticks.longest)
        del copy
    held, brief, beside, stall = map(statistics.median, (whole, copied, written, stalls))
    return (
        f"| {name} | {num_bytes / 1e6:.0f} | {ms(held)} | {ms(brief)} | {held / brief:.0f} | "
        f"{ms(beside)} | {ms(stall)} |"
    )


class Ticks:
    """A thread that wants the interpreter every millisecond, and knows how long it waited at most,
    in seconds.
    """

    def __enter__(self) -> Ticks:
        self.longest = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._over.wait(0.001):
            now = time.perf_counter()
            self.longest = max(self.longest, now - last)
            last = now

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


if __name__ == "__main__":
    main()
