"""What it costs to train on truncated turns: bytes of a token's record, the engine's sampling with
and without it, the trainer's scores over it, and the mismatch that is left.

python benchmarks/sampling_masks.py [--vocabulary 151936] [--rows 8] [--rounds 3]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from smoke import options_of

from midflight.engines.embedded.sampler import SamplingBatch, sample
from midflight.trainer.model.scores import Kept, token_scores
from midflight.types.kept import unpack_kept

CASES = (
    ("top-k 20", 1.0, 20, 0.0),
    ("min-p 0.05", 1.0, 0, 0.05),
    ("top-p 0.95", 0.95, 0, 0.0),
    ("top-p 0.95, top-k 50, min-p 0.01", 0.95, 50, 0.01),
    ("top-p 0.999", 0.999, 0, 0.0),
)
WIDTH = 64
"""Of the hidden states that are scored."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=8, help="requests decoded together")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of each measurement; the shortest time counts"
    )
    o = options_of(parser, vocabulary=1000, rows=4, rounds=1)
    torch.set_num_threads(1)
    hidden, weight = head(o.vocabulary, o.rows)
    logits = (hidden @ weight.T).detach()
    print(
        "| truncation | ids kept, mean (most) | bytes a token, mean (most) | sampling ms a step | "
        "with records | scores and gradient ms | over the sets | largest difference, nats | "
        "without the sets |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, top_p, top_k, min_p in CASES:
        print(
            row(
                name,
                settings(o.rows, top_p=top_p, top_k=top_k, min_p=min_p),
                logits,
                hidden,
                weight,
                rounds=o.rounds,
            ),
            flush=True,
        )


def row(
    name: str,
    plain: SamplingBatch,
    logits: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    rounds: int,
) -> str:
    wanting = replace(plain, wants_kept=np.ones(len(logits), np.bool_))
    found = sample(logits, wanting)
    records = [record or b"" for record in found.kept]
    lengths = np.array([len(record) for record in records])
    kept = Kept(*unpack_kept(np.frombuffer(b"".join(records), np.uint8), lengths))
    counts = np.diff(kept.offsets)
    targets = torch.from_numpy(found.token_ids)
    behaviour = torch.from_numpy(found.logprobs)

    def scored(over: Kept | None) -> torch.Tensor:
        scores, _ = token_scores(hidden, weight, None, targets, temperature=1.0, kept=over)
        torch.autograd.backward(scores.sum())
        return (scores.detach().double() - behaviour).abs().max()

    times = [
        1000 * shortest(each, rounds)
        for each in (
            lambda: sample(logits, plain),
            lambda: sample(logits, wanting),
            lambda: scored(None),
            lambda: scored(kept),
        )
    ]
    return (
        f"| {name} | {counts.mean():.0f} ({counts.max()}) | {lengths.mean():.0f} ({lengths.max()}) "
        f"| {times[0]:.0f} | {times[1]:.0f} | {times[2]:.0f} | {times[3]:.0f} | "
        f"{float(scored(kept)):.1e} | {float(scored(None)):.1e} |"
    )


def shortest(deed: Callable[[], object], rounds: int) -> float:
    """Seconds of the processor, so that other programs do not count; on one thread."""
    taken: list[float] = []
    for _ in range(rounds):
        start = time.process_time()
        deed()
        taken.append(time.process_time() - start)
    return min(taken)


def head(vocabulary: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and an output layer whose logits fall off as Zipf's law does, with noise: rows
    from sure to unsure.
    """
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, WIDTH, generator=draw) * 0.1
    weight[:, 0] = -torch.log(torch.randperm(vocabulary, generator=draw) + 1.0)
    hidden = torch.randn(rows, WIDTH, generator=draw)
    hidden[:, 0] = torch.linspace(1.1, 3.0, rows)
    return hidden.requires_grad_(), weight.requires_grad_()


def settings(rows: int, *, top_p: float, top_k: int, min_p: float) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.ones(rows),
        top_p=np.full(rows, top_p),
        top_k=np.full(rows, top_k),
        min_p=np.full(rows, min_p),
        seeds=np.arange(rows),
        positions=np.zeros(rows, dtype=np.int64),
        suppressed=None,
    )


if __name__ == "__main__":
    main()
