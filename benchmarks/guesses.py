"""What guessing ahead saves (`engine.guesses`): the embedded engine beside itself without, in
tokens per CPU second.

| workload | what is generated |
|---|---|
| repeating | greedily, which a model with random weights does round and round: nearly all guesses are right |
| new | at temperature 1, after prompts with pairs of tokens that come again: guesses are made, and nearly all are wrong |

    python benchmarks/guesses.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from prefixes import engine
from smoke import options_of

from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.embedded.prefixes import PrefixRoom
from midflight.types import GenerateRequest, SamplingParams


def speed(asked: EmbeddedEngine, *, running: int, temperature: float, answer: int) -> float:
    """Tokens per CPU second of as many requests at once."""
    told = [tuple((7 * c + k * k) % 29 for k in range(32)) for c in range(running)]
    sampling = [
        SamplingParams(max_tokens=answer, ignore_eos=True, seed=c, temperature=temperature)
        for c in range(running)
    ]
    began = time.process_time()
    asked.generate_all(
        [GenerateRequest(f"{c}", ids, len(ids), sampling[c]) for c, ids in enumerate(told)]
    )
    return running * answer / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--hidden", type=int, default=256, help="256 is a model of 3.2 million parameters"
    )
    parser.add_argument("--guesses", type=int, default=7)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--answer", type=int, default=128, help="tokens of each answer")
    options = options_of(parser, rounds=1, hidden=32, running=[2], answer=16)
    torch.set_num_threads(1)
    print(
        f"{'workload':>9} {'requests':>9} {'without, tokens/s':>18} {'with':>7} "
        f"{'with / without':>15}"
    )
    for name, temperature in (("repeating", 0.0), ("new", 1.0)):
        for running in options.running:
            speeds: dict[int, list[float]] = {0: [], options.guesses: []}
            for _ in range(options.rounds):
                for guesses, found in speeds.items():
                    asked = engine(
                        options.hidden, prefixes=PrefixRoom(0), running=running, guesses=guesses
                    )
                    found.append(
                        speed(
                            asked, running=running, temperature=temperature, answer=options.answer
                        )
                    )
            without, ahead = (statistics.median(found) for found in speeds.values())
            print(
                f"{name:>9} {running:>9} {without:>18.0f} {ahead:>7.0f} {ahead / without:>15.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
