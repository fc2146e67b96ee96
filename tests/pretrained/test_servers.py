"""SmolLM2 is trained on other people's servers while they answer. Then every token is computed again, by the weights of the version that it claims."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.real_engines.process import Kind, interpreter
from tests.real_engines.reference import labelled_logprobs
from transformers import AutoModelForCausalLM, PreTrainedModel

from midflight.archive.store_reader import reading
from midflight.models.names import assign, named_tensors
from midflight.trajectories.database import decode_rows
from midflight.types import Row, Version

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from harness.runs import train, train_command

ROOT = Path(__file__).parents[2]
STEPS = 5
MOST_TOKENS = 64
NUM_IN_FLIGHT = 2
SETTINGS = (
    f"run.steps={STEPS}",
    "rollout.groups_per_step=4",
    f"rollout.group_size={NUM_IN_FLIGHT}",
    f"rollout.max_in_flight={NUM_IN_FLIGHT}",
    f"engine.max_running={NUM_IN_FLIGHT}",
    "engine.dtype=float32",
    f"environment.max_tokens={MOST_TOKENS}",
    "environment.sources.0.heldout=4",
    'environment.sources.0.prompt="What is {expression}? Explain each step."',
    'environment.rewards=[{entry = "tests.pretrained.rewards:variety"}]',
    "trainer.warmup_steps=0",
    "trainer.micro_batch_tokens=512",
    "trainer.checkpoint_every=1",
    f"trainer.keep_checkpoints={STEPS}",
    # However busy the machine is:
    "gateway.request_seconds=900",
    "environment.max_rollout_seconds=3600",
    "weights.stage_seconds=600",
    "weights.commit_seconds=600",
    "run.stall_seconds=900",
)
"""Long answers, and so few at once that the trainer waits for them and not they for it: whenever a version comes, all of them are under way.
Each step moves the weights, and all versions are kept, which takes 8 GB of disk."""
ROUNDING = 2e-4
"""Nats, by which two ways of computing the same in float32 may differ: three times the most that was measured. In bfloat16 it would be tenths."""
APART = 100 * ROUNDING
"""Nats, by which some token must differ from what the version before would have said: else the comparison shows nothing."""


@dataclass(frozen=True)
class Answer:
    """One that was stored, with what the engine said of each token."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]
    labels: tuple[tuple[Version, Version], ...]
    """Version and kv_version of each token."""

    @classmethod
    def of(cls, row: Row) -> Answer:
        begin = int(row.generated.argmax())
        assert row.generated[begin:].all(), "a single turn"
        ids, labels = row.token_ids.tolist(), zip(row.versions[begin:].tolist(), row.kv_versions[begin:].tolist(), strict=True)
        return cls(tuple(ids[:begin]), tuple(ids[begin:]), tuple(row.logprobs[begin:].tolist()), tuple(labels))

    @cached_property
    def versions(self) -> tuple[Version, ...]:
        return tuple(version for version, _ in self.labels)


class Versions:
    """The weights that a run began with and those that its steps made, as models of plain `transformers`."""

    def __init__(self, first: Path, run: Path) -> None:
        self._first, self._checkpoints = first, run / "checkpoints"
        self._made: dict[Version, PreTrainedModel] = {}

    def __call__(self, version: Version) -> PreTrainedModel:
        if version not in self._made:
            model = AutoModelForCausalLM.from_pretrained(self._first, dtype=torch.float32)
            if version:
                assign(model, self._stored(version, named_tensors(model)))
            self._made[version] = model
        return self._made[version]

    def _stored(self, version: Version, names: Iterable[str]) -> dict[str, torch.Tensor]:
        with safe_open(self._checkpoints / f"version-{version:08d}" / "rank-00000.safetensors", "pt") as file:
            return {name: file.get_tensor(f"model/{name}") for name in names}


@pytest.mark.parametrize("transport", ["direct", "shared_memory"])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_i6_every_token_that_a_server_makes_in_flight_is_of_the_version_that_it_claims(
    kind: Kind, transport: str, fetched: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(kind, transport, fetched[0], tmp_path, monkeypatch)
    answers = stored(run)
    several = [answer for answer in answers if len(set(answer.versions)) > 1]
    assert len(several) > NUM_IN_FLIGHT, "versions come while answers are under way"
    models = Versions(fetched[0], run)
    as_claimed = [apart(answer, expected(answer, models)) for answer in answers]
    plain = [apart(answer, by_one_version_each(answer, models)) for answer in several]
    before = [apart(answer, by_one_version_each(answer, models, younger_by=1)) for answer in several]
    print(
        f"\n{kind}, {transport}: {sum(len(answer.output) for answer in answers):,} tokens of {len(answers)} answers, {len(several)} of several "
        f"versions, {len({v for answer in answers for v in answer.versions})} versions; nats at most {max(as_claimed):.1e}; without the keys "
        f"of older versions {max(plain):.1e}; by the version before {max(before):.1e}"
    )
    assert max(as_claimed) < ROUNDING
    assert max(before) > APART
    shutil.rmtree(run)  # gigabytes, which pytest would keep


def trained(kind: Kind, transport: str, model: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run in which nothing has failed."""
    monkeypatch.chdir(ROOT)  # where the configuration finds its reward
    settings = (
        *SETTINGS,
        f"model.path={model}",
        f"engine.kind={kind}",
        f"engine.python={interpreter(kind)}",
        f"weights.transport={transport}",
    )
    command = train_command(ROOT / "configs" / "pretrained-sums.toml", settings, folder=place / "run")
    train(command, said=place / "said.txt")
    summary: dict[str, Any] = json.loads((place / "run" / "summary.json").read_text())
    failures = (place / "said.txt").read_text()
    assert (summary["steps"], summary["failed_requests"], summary["failed_rollouts"]) == (STEPS, 0, 0), failures
    return place / "run"


def stored(run: Path) -> list[Answer]:
    """All that have ended, also those that no step has taken."""
    with reading(run) as store:
        found = [
            row for (blob,) in store.ask("SELECT rows FROM rollouts ORDER BY epoch, position, attempt, sample") for row in decode_rows(blob)
        ]
    assert all(row.loss_mask.sum() == row.generated.sum() for row in found), "every token is trained"
    return [Answer.of(row) for row in found]


def expected(answer: Answer, models: Versions) -> list[float]:
    """By the version of each token, with the keys that its label names. Where the answer was asked for before its first version went live,
    its prompt may have been read before by the older one: then the nearer of the two is taken."""
    (version, kv_version), *_ = answer.labels
    read_by = {version, kv_version}
    made = [labelled_logprobs(models, answer.prompt, answer.output, answer.labels, prompt_read_by=reader) for reader in sorted(read_by)]
    return min(made, key=lambda logprobs: apart(answer, logprobs))


def by_one_version_each(answer: Answer, models: Versions, *, younger_by: int = 0) -> list[float]:
    """Each token by its version, or one that came so many before it, over everything before it."""
    wanted = [max(0, version - younger_by) for version in answer.versions]
    made = {v: labelled_logprobs(models, answer.prompt, answer.output, [(v, v)] * len(wanted)) for v in set(wanted)}
    return [made[version][at] for at, version in enumerate(wanted)]


def apart(answer: Answer, logprobs: Sequence[float]) -> float:
    """The largest difference from what the engine said."""
    return max(abs(ours - theirs) for ours, theirs in zip(logprobs, answer.logprobs, strict=True))
