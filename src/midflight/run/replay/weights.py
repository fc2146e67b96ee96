"""`midflight ledger --prove --weights`: log-probabilities of recorded tokens, computed again by plain
`transformers` with the weights that the run has kept.

An engine reads the prompt of an answer and samples its tokens one after the other. The step that
samples a token also makes the keys of the token before it. If a new version comes in the middle of
an answer and the keys stay, later tokens attend to keys of several versions. A token's label names
its version and the version of the oldest key. Where an engine began with older keys, the record
says which these are (`OlderKeys`). The keys are made here as labels and record say.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from midflight.archive.store_reader import reading
from midflight.config.derived import served_dtype
from midflight.config.load import past_config
from midflight.config.sections import Config
from midflight.errors import CheckpointCorrupt, NoRun, StoreCorrupt
from midflight.models.caches import cache_name
from midflight.models.load import load_model
from midflight.models.names import assign, named_tensors
from midflight.run.replay.fingerprints import recorded_fingerprints, served_fingerprint
from midflight.trainer.checkpoint import WEIGHTS
from midflight.trainer.folders import Shards, checkpoints, verified, version_of
from midflight.types import KeyRuns, Row, Version
from midflight.types.digests import Conditions, read_conditions
from midflight.types.rollouts import TurnRecord
from midflight.types.sampling_masks import unpack_kept

BOUNDS: Mapping[str, float] = {"float32": 2e-3, "bfloat16": 0.25, "float16": 0.05}
"""Nats by which two ways of computing the same may differ, by the type that engines serve in."""


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One recorded answer. The tokens [first, end) of a row."""

    rollout: str
    row: Row
    record: TurnRecord
    conditions: Conditions

    @property
    def labels(self) -> list[tuple[Version, Version]]:
        """The version and the version of the oldest key of each token."""
        place = slice(self.record.first, self.record.end)
        versions = self.row.versions[place].tolist()
        return list(zip(versions, self.row.kv_versions[place].tolist(), strict=True))

    @property
    def older_keys(self) -> dict[int, KeyRuns]:
        """The keys that an engine began with, if some were older, by the number of the token that
        it sampled first.
        """
        return {keys.place: keys.runs for keys in self.conditions.older_keys}

    @property
    def lacks_older_keys(self) -> bool:
        """True if its first token attended to keys of an older version, and the record does not say
        which these were.
        """
        version, kv_version = self.labels[0]
        return kv_version < version and 0 not in self.older_keys

    @property
    def versions(self) -> set[Version]:
        found = {version for label in self.labels for version in label}
        for runs in self.older_keys.values():
            found |= {version for version, _ in runs}
        return found


@dataclass(frozen=True, slots=True)
class Difference:
    """The token whose log-probability differs most."""

    rollout: str
    token: int
    """Its place in the row."""
    version: Version
    recorded: float
    computed: float

    @property
    def nats(self) -> float:
        """Infinite where one of the two is no number."""
        apart = abs(self.recorded - self.computed)
        return apart if math.isfinite(apart) else math.inf


@dataclass(frozen=True, slots=True)
class WeightsProof:
    num_answers: int
    num_tokens: int
    worst: Difference | None
    bound: float
    kept: tuple[Version, ...]
    """The versions whose weights the run has kept."""
    wrong: tuple[str, ...] = ()
    """A sentence for each kept version whose weights are not those of the steps' digests."""
    num_compared: int = 0
    """Kept versions, and the exported model, whose weights are those of the steps' digests."""
    num_mixed: int = 0
    """Answers that are not judged: parts of their prompt have keys of older versions, and their
    engine did not say which, as servers and older Midflights do not.
    """

    @property
    def holds(self) -> bool:
        is_near = self.worst is None or self.worst.nats <= self.bound
        return is_near and not self.wrong


def prove_weights(folder: Path, *, number: int = 32, seed: int | None = None) -> WeightsProof:
    """Compares the weights that the run has kept with the digests of its steps. Computes the tokens
    of so many answers again, chosen among those whose versions are all kept. Without a seed nobody
    can know beforehand which.
    """
    disable_progress_bar()
    config = past_config(folder / "config.toml")
    models = KeptVersions(folder, config)
    compared = list(_compared_weights(folder, config, models))
    wrong = tuple(one for one in compared if one)
    judged = [answer for answer in _answers(folder) if answer.versions <= models.versions]
    chosen = random.Random(seed).sample(judged, min(number, len(judged)))
    worst: Difference | None = None
    num_tokens = 0
    num_mixed = 0
    bound = BOUNDS.get(served_dtype(config), max(BOUNDS.values()))
    for answer in chosen:
        found = [
            difference
            for difference in _differences(answer, models)
            # an engine may have left the log-probability of a masked token out
            if answer.row.loss_mask[difference.token]
        ]
        largest = max(found, key=lambda difference: difference.nats)
        if largest.nats > bound and answer.lacks_older_keys:
            num_mixed += 1
            continue
        num_tokens += len(found)
        if worst is None or largest.nats > worst.nats:
            worst = largest
    return WeightsProof(
        len(chosen) - num_mixed,
        num_tokens,
        worst,
        bound,
        tuple(sorted(models.versions)),
        wrong,
        len(compared) - len(wrong),
        num_mixed,
    )


def _compared_weights(folder: Path, config: Config, models: KeptVersions) -> Iterator[str]:
    """Yields a sentence for each checkpoint, and the exported model, that does not have the weights
    of its step, and an empty text for each that has them.
    """
    recorded = recorded_fingerprints(folder)
    for version in sorted(models.versions & recorded.keys()):
        try:
            verified(models.folder_of(version))
        except CheckpointCorrupt as error:
            yield str(error)
            continue
        if served_fingerprint(models.load(version), config) == recorded[version]:
            yield ""
        else:
            yield f"the checkpoint of version {version} has other weights than its step made"
    if config.lora.rank is None and recorded and (folder / "model").is_dir():
        newest = max(recorded)
        model = load_model(folder / "model", dtype=config.model.dtype, device="cpu")
        same = served_fingerprint(model, config) == recorded[newest]
        yield "" if same else f"{folder / 'model'} has other weights than the last step made"


class KeptVersions:
    """The models of a run's kept versions: its checkpoints."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._start = folder / "start"
        self._dtype = config.model.dtype
        self._folders = {version_of(path): path for path in checkpoints(folder / "checkpoints")}
        self._made: dict[Version, PreTrainedModel] = {}

    @property
    def versions(self) -> set[Version]:
        return set(self._folders)

    def folder_of(self, version: Version) -> Path:
        return self._folders[version]

    def __call__(self, version: Version) -> PreTrainedModel:
        if version not in self._made:
            self._made[version] = self.load(version)
        return self._made[version]

    def load(self, version: Version) -> PreTrainedModel:
        """The model, which is not kept here."""
        model = load_model(self._start, dtype=self._dtype, device="cpu")
        room = {name: torch.empty_like(t) for name, t in named_tensors(model).items()}
        Shards(self._folders[version]).read(
            {WEIGHTS + name: tensor for name, tensor in room.items()}
        )
        assign(model, room)
        return model.eval()


def _answers(folder: Path) -> Iterator[RecordedAnswer]:
    with reading(folder) as store:
        for *key, blob in store.each(
            "SELECT epoch, position, attempt, sample, rows FROM rollouts ORDER BY epoch, position, "
            "attempt, sample"
        ):
            name = "-".join(map(str, key))
            try:
                rows = store.rows(blob)
            except StoreCorrupt:  # the proof of the digests names it
                continue
            for row in rows:
                for record in row.records:
                    if record.end > record.first and row.loss_mask[record.first : record.end].any():
                        try:
                            conditions = read_conditions(record.conditions)
                        except msgspec.MsgspecError:  # as above
                            continue
                        yield RecordedAnswer(name, row, record, conditions)


def _differences(
    answer: RecordedAnswer, models: Callable[[Version], PreTrainedModel]
) -> list[Difference]:
    """The differences of an answer's tokens. Where the record does not say which keys it began
    with, its prompt may have been read by the version of its first token, or by an older one if it
    was asked for before a new version came: the nearer of the two counts.
    """
    labels = answer.labels
    place = slice(answer.record.first, answer.record.end)
    recorded = answer.row.logprobs[place].astype(np.float64)
    known = answer.older_keys
    guesses = [known]
    if answer.lacks_older_keys:
        version, reader = labels[0]
        guesses.append({**known, 0: ((reader, answer.record.first - 1), (version, 1))})
    tries = [_logprobs(answer, models, older_keys=guess) for guess in guesses]
    nearest = min(tries, key=lambda made: float(np.abs(made - recorded).max()))
    return [
        Difference(
            answer.rollout,
            answer.record.first + number,
            labels[number][0],
            float(recorded[number]),
            float(nearest[number]),
        )
        for number in range(len(labels))
    ]


def _logprobs(
    answer: RecordedAnswer,
    models: Callable[[Version], PreTrainedModel],
    *,
    older_keys: Mapping[int, KeyRuns],
) -> NDArray[np.float64]:
    """The log-probabilities of an answer's tokens, [T]. `older_keys` are as in `RecordedAnswer`."""
    ids = answer.row.token_ids[: answer.record.end].tolist()
    first = answer.record.first
    begun = np.searchsorted(sorted(older_keys), np.arange(len(answer.labels)), side="right")
    keys: object = None
    num_keys = 0
    parts: list[Tensor] = []
    end = first
    for ((version, kv_version), _), run in groupby(zip(answer.labels, begun.tolist(), strict=True)):
        length = len(list(run))
        if end - first in older_keys:
            keys = _keys(older_keys[end - first], ids[: end - 1], models)
            num_keys = end - 1
        elif version == kv_version:
            keys = None
            num_keys = 0
        end += length
        logits, keys = _read(models(version), ids[num_keys : end - 1], keys)
        num_keys = end - 1
        parts.append(logits[-length:])
    logits = _as_sampled(torch.cat(parts).double(), answer)
    chosen = torch.tensor(ids[first:])[:, None]
    return logits.log_softmax(-1).gather(-1, chosen)[:, 0].numpy()


def _keys(
    runs: KeyRuns, ids: Sequence[int], models: Callable[[Version], PreTrainedModel]
) -> object:
    """The keys of these tokens, each made by the version that `runs` say."""
    keys: object = None
    start = 0
    for version, number in runs:
        read = ids[start : start + number]
        if read:
            _, keys = _read(models(version), read, keys)
        start += number
    return keys


def _as_sampled(logits: Tensor, answer: RecordedAnswer) -> Tensor:
    """The logits [T, V] at the temperature of the request, over the ids that truncation left."""
    sampling = answer.conditions.sampling
    if sampling is not None and sampling.temperature > 0:
        logits = logits / sampling.temperature
    for number, ids in enumerate(_kept(answer.row, answer.record)):
        if len(ids):
            mask = torch.ones(logits.shape[1], dtype=torch.bool)
            mask[torch.from_numpy(ids)] = False
            logits[number, mask] = -torch.inf
    return logits


def _kept(row: Row, record: TurnRecord) -> Iterator[NDArray[Any]]:
    """Yields the ids that truncation left to each token; none where it cut nothing off."""
    if row.kept is None or row.kept_lengths is None:
        return
    ends = np.cumsum(row.kept_lengths)
    begin = int(ends[record.first] - row.kept_lengths[record.first])
    lengths = row.kept_lengths[record.first : record.end].astype(np.int64)
    data = row.kept[begin : begin + int(lengths.sum())]
    ids, offsets = unpack_kept(data, lengths)
    for number in range(len(lengths)):
        yield ids[offsets[number] : offsets[number + 1]]


def kept_of(row: Row, record: TurnRecord) -> tuple[bytes, ...]:
    """The records of truncation of an answer's tokens; empty if it has none."""
    if row.kept is None or row.kept_lengths is None:
        return ()
    ends = np.cumsum(row.kept_lengths)[record.first : record.end].tolist()
    lengths = row.kept_lengths[record.first : record.end].tolist()
    return tuple(
        row.kept[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)
    )


def _read(model: PreTrainedModel, tokens: Sequence[int], keys: object) -> tuple[Tensor, object]:
    """Logits [T, V] of tokens over these keys, and the keys with theirs."""
    name = cache_name(model)
    if name is None:
        raise NoRun(
            f"{type(model).__name__} keeps no keys, so that its log-probabilities cannot be computed "
            "again here."
        )
    given: dict[str, Any] = {} if keys is None else {name: keys}
    with torch.no_grad():
        made = model(torch.tensor([tokens]), use_cache=True, **given)
    return made.logits[0], made[name]
