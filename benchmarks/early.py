"""What it costs and saves to begin a step before its batch is whole, in CPU seconds of the trainer:
the same step with nothing begun, and with micro-batches of it done while the last groups were still
generated.

    python benchmarks/early.py [--rounds 7]

Ways alternate from round to round. *CPU* is of the whole step, in that of a step of which nothing
was begun; *left* what is to do once the last group is there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np
import torch
from smoke import options_of

from midflight.models.creation import make_model
from midflight.text.byte_tokenizer import VOCAB_SIZE
from midflight.trainer.credit import Scoring
from midflight.trainer.objective import Objective
from midflight.trainer.optimizer import Adam
from midflight.trainer.schedule import Schedule
from midflight.trainer.trainer import PolicyTrainer
from midflight.types import PackedBatch, Version

GROUP = 8
PROMPT = 32


def groups(version: Version, *, first: int, number: int, answer: int) -> PackedBatch:
    """Some of a batch's groups, each of its own prompt and its own answers, whichever others there
    are.
    """
    rows = number * GROUP
    draw = [np.random.default_rng((version, group)) for group in range(first, first + number)]
    prompts = np.concatenate(
        [np.repeat(d.integers(0, 256, (1, PROMPT)), GROUP, axis=0) for d in draw]
    )
    answers = np.concatenate([d.integers(0, 256, (GROUP, answer)) for d in draw])
    mask = np.concatenate(
        [np.zeros((rows, PROMPT), np.bool_), np.ones((rows, answer), np.bool_)], axis=1
    ).ravel()
    return PackedBatch(
        lease=1,
        train_version=version,
        token_ids=np.concatenate([prompts, answers], axis=1).astype(np.int32).ravel(),
        loss_mask=mask,
        logprobs=np.full(len(mask), -5.5, np.float32),
        versions=np.full(len(mask), version, np.int32),
        kv_versions=np.full(len(mask), version, np.int32),
        row_offsets=np.arange(0, len(mask) + 1, PROMPT + answer, dtype=np.int32),
        row_rollout=np.arange(rows, dtype=np.int32),
        rewards=np.concatenate([d.integers(0, 4, GROUP) for d in draw]).astype(np.float32),
        rollout_group=np.repeat(np.arange(number), GROUP).astype(np.int32),
        truncated=np.zeros(rows, np.bool_),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--answer", type=int, default=128)
    options = options_of(parser, rounds=1, hidden_size=64, groups=4, answer=8)
    torch.set_num_threads(1)
    model = make_model(
        vocab_size=VOCAB_SIZE,
        hidden_size=options.hidden_size,
        intermediate_size=3 * options.hidden_size,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        max_context=PROMPT + options.answer,
        seed=0,
        dtype="float32",
    )
    trainer = PolicyTrainer(
        model, Objective(), scoring=Scoring(), schedule=Schedule(), adam=Adam(1e-4)
    )
    parts = (0, options.groups // 4, 3 * options.groups // 4)
    cpu = {begun: list[float]() for begun in parts}
    left = {begun: list[float]() for begun in parts}
    for number in range(options.rounds + 1):
        for begun in parts:
            whole = groups(trainer.version, first=0, number=options.groups, answer=options.answer)
            began = time.process_time()
            for first in range(0, begun, options.groups // 4):
                trainer.begin(
                    replace(
                        groups(
                            trainer.version,
                            first=first,
                            number=options.groups // 4,
                            answer=options.answer,
                        ),
                        lease=0,
                    )
                )
            last = time.process_time()
            report = trainer.step(whole)
            ended = time.process_time()
            assert bool(report.metrics["step/early_share"]) == bool(begun), (
                "what was begun is in the batch"
            )
            if number:
                cpu[begun].append(ended - began)
                left[begun].append(ended - last)
    plain = statistics.median(cpu[0])
    print(
        f"{options.groups} groups of {GROUP} answers of {options.answer} tokens: {plain:.2f} s of "
        "CPU with nothing begun\n"
    )
    print("| begun | CPU | left |\n|---|---|---|")
    for begun in parts[1:]:
        print(
            f"| {begun} groups | {statistics.median(cpu[begun]) / plain:.2f} | "
            f"{statistics.median(left[begun]) / plain:.2f} |"
        )


if __name__ == "__main__":
    main()
