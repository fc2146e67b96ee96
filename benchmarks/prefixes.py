"""What it saves to keep the keys of conversations: the embedded engine beside itself without
(`engine.prefix_mb = 0`), in CPU seconds.

| workload | what is asked |
|---|---|
| turns | conversations side by side, each turn with all turns before it and some new tokens |
| short | prompts of which no two begin alike: what keeping costs where nothing is found |

    python benchmarks/prefixes.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from engine import NoWeights
from smoke import options_of

from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.embedded.prefixes import PrefixRoom
from midflight.models.creation import make_model
from midflight.text import Tokenizer
from midflight.text.byte_tokenizer import END, VOCAB_SIZE, byte_tokenizer
from midflight.types import GenerateRequest, SamplingParams
from midflight.types.facts import unheard

CONTEXT = 4096


def engine(hidden: int, *, prefixes: PrefixRoom, running: int, guesses: int = 0) -> EmbeddedEngine:
    tokenizer = Tokenizer(byte_tokenizer(), template=None, eos_token_ids=frozenset({END}))
    model = make_model(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        max_context=CONTEXT,
        seed=0,
        dtype="float32",
    )
    return EmbeddedEngine(
        model,
        tokenizer=tokenizer,
        name="bench",
        receiver=NoWeights(),
        record=unheard,
        max_running=running,
        max_batch_tokens=2048,
        max_context=CONTEXT,
        pause_lease_seconds=30,
        prefixes=prefixes,
        guesses=guesses,
    )


def seconds(
    asked: EmbeddedEngine, *, conversations: int, turns: int, new: int, answer: int
) -> float:
    """CPU seconds of all turns; the tokens of each conversation begin otherwise than those of the
    others.
    """
    began = time.process_time()
    told = [tuple((7 * c + k * (c + 1)) % 251 for k in range(new)) for c in range(conversations)]
    for turn in range(turns):
        requests = [
            GenerateRequest(
                f"{c}",
                ids,
                len(ids),
                SamplingParams(max_tokens=answer, ignore_eos=True, seed=c + 64 * turn),
            )
            for c, ids in enumerate(told)
        ]
        for c, made in enumerate(asked.generate_all(requests)):
            told[c] = (*told[c], *made.token_ids, *((11 * c + k) % 251 for k in range(new)))
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--hidden", type=int, default=256, help="256 is a model of 3.2 million parameters"
    )
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument(
        "--new", type=int, default=256, help="tokens of each turn that come from outside"
    )
    parser.add_argument("--answer", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--short-answer", type=int, default=128)
    options = options_of(parser, rounds=1, turns=2, new=16, hidden=32, short_answer=4)
    torch.set_num_threads(1)
    print(f"{'workload':>9} {'without, CPU s':>15} {'with, CPU s':>12} {'without / with':>15}")
    for name, shape in {
        "turns": {
            "conversations": 8,
            "turns": options.turns,
            "new": options.new,
            "answer": options.answer,
        },
        "short": {"conversations": 64, "turns": 1, "new": 32, "answer": options.short_answer},
    }.items():
        times: dict[int, list[float]] = {0: [], 2**28: []}
        for _ in range(options.rounds):
            for room, found in times.items():
                found.append(
                    seconds(
                        engine(
                            options.hidden,
                            prefixes=PrefixRoom(room),
                            running=shape["conversations"],
                        ),
                        **shape,
                    )
                )
        without, kept = (statistics.median(found) for found in times.values())
        print(f"{name:>9} {without:>15.2f} {kept:>12.2f} {without / kept:>15.2f}", flush=True)


if __name__ == "__main__":
    main()
