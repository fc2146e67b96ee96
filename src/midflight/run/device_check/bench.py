"""What the trials of a device work with: the device, models in two sizes, and the way in which a
trial ends.
"""

from __future__ import annotations

import fcntl
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.errors import MidflightError, first_error
from midflight.models.creation import make_model
from midflight.models.export import export_model
from midflight.models.load import load_model
from midflight.models.proof import described, own_logprobs
from midflight.observe.readable import size as readable_size
from midflight.run.device_check.report import DeviceTrial, TrialOutcome
from midflight.run.device_check.table import GIB, REAL_GIGABYTES
from midflight.text.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.trainer.credit import Scoring
from midflight.trainer.model.ranks import Ranks
from midflight.trainer.objective import Objective
from midflight.trainer.optimizer import Adam
from midflight.trainer.schedule import Schedule
from midflight.trainer.trainer import PolicyTrainer, Scale
from midflight.types import GenerateRequest, PackedBatch, SamplingParams, Version
from midflight.types.facts import record_nothing
from midflight.weights.transports.select import receiver

TOLERANCE = 1e-3
"""Nats between log-probabilities in float32 that two ways of computing may give, as in the proofs of
a model. Rounding gives 1e-5, and what is wrong gives more than 1e-2.
"""
TF32_TOLERANCE = 5e-3
"""The same where a server computes on a GPU: by its source, vLLM's attention multiplies float32 as
TF32, with 10 bits. 2.2e-3 was seen on an H200.
"""
GROUP = 8
"""Rollouts of a group."""
PROMPT = 32
"""Tokens of a prompt."""
LEARNING_RATE = 1e-3
"""It is large enough that a step changes the weights visibly."""


@dataclass(frozen=True, slots=True)
class BenchSize:
    """The sizes of a model and of the work that it is given."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    running: tuple[int, ...]
    """Numbers of requests that are decoded together."""
    answer: int
    """Tokens of an answer."""
    groups: int
    """Groups of a step."""
    micro_batch: int
    """Tokens of a micro-batch."""
    needs: int
    """Bytes of the device's memory that its trials take."""


SMALL = BenchSize(
    "small",
    hidden=128,
    inner=384,
    layers=2,
    heads=2,
    kv_heads=1,
    vocabulary=VOCAB_SIZE,
    context=256,
    running=(1, 8),
    answer=32,
    groups=2,
    micro_batch=512,
    needs=0,
)
REAL = BenchSize(
    "half a billion weights",
    hidden=1024,
    inner=3072,
    layers=28,
    heads=16,
    kv_heads=8,
    vocabulary=151_936,
    context=2048,
    running=(1, 8, 64),
    answer=256,
    groups=16,
    micro_batch=8192,
    needs=REAL_GIGABYTES * GIB,
)
"""A Qwen3 of 28 layers. A step takes weights, gradients and two moments in float32, 9 GB, and the
logits of a micro-batch, 5 GB, with their gradient.
"""


class Wrong(Exception):
    """A trial that came to an end with a wrong result. The text says which."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a trial that works, and the bound on it."""

    text: str
    limit: str = ""


def tried(what: str, deed: Callable[[], str | Found], *, remedy: str) -> DeviceTrial:
    """The trial of one thing. Any error of it is its result: `remedy` names the option that avoids
    it.
    """
    began = time.monotonic()
    try:
        found = deed()
    except Exception as error:  # a device may fail in any way
        cause = first_error(error)
        said = str(cause) if isinstance(cause, Wrong | MidflightError) else described(cause)
        seconds = time.monotonic() - began
        return DeviceTrial(what, TrialOutcome.FAILED, said, remedy=remedy, seconds=seconds)
    if isinstance(found, str):
        found = Found(found)
    seconds = time.monotonic() - began
    return DeviceTrial(what, TrialOutcome.WORKS, found.text, found.limit, seconds=seconds)


def not_tried(what: str, why: str) -> DeviceTrial:
    """The trial of something that this machine cannot try."""
    return DeviceTrial(what, TrialOutcome.NOT_TRIED, why)


def within(number: float, bound: float, unit: str) -> str:
    """The number in words. Raises `Wrong` if it is above the bound, or is none."""
    if not number <= bound:
        raise Wrong(f"{number:.2g} {unit}, and at most {bound:.2g} are rounding")
    return f"{number:.2g} {unit}"


@dataclass(frozen=True, slots=True)
class Bench:
    """The device, and a folder for what trials write."""

    device: torch.device
    scratch: Path
    room: int = 0
    """The bytes of a GPU's memory that trials may take. Other parts may take the rest."""
    prefix: str = "midflight-doctor-"
    """The beginning of the names of shared memory."""

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def num_devices(self) -> int:
        """Devices of this kind that the process sees; 1 if it is the CPU."""
        return torch.cuda.device_count() if self.is_cuda else 1

    @property
    def sizes(self) -> Sequence[BenchSize]:
        """The sizes that are tried here."""
        return (SMALL,) if self.why_not_real else (SMALL, REAL)

    @property
    def why_not_real(self) -> str:
        """The reason why nothing is tried in real size. Empty if it is."""
        if not self.is_cuda:
            return f"{self.device} is no GPU, and the real size would take it more than ten minutes"
        if self.room < REAL.needs:
            return (
                f"{readable_size(self.room)} of {self.device} are free, and the real size takes "
                f"{readable_size(REAL.needs)}"
            )
        return ""

    def folder(self, size: BenchSize, *, seed: int = 0) -> Path:
        """The folder of a model of random weights, which is made when it is first asked for. Waits
        while another part makes it.
        """
        folder = self.scratch / f"{size.name.replace(' ', '-')}-{seed}"
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # free as soon as this process is dead
            if not folder.exists():
                _make_model(folder, size, seed=seed)
        return folder

    def model(
        self,
        size: BenchSize,
        *,
        seed: int = 0,
        dtype: str = "float32",
        device: torch.device | None = None,
    ) -> PreTrainedModel:
        """A model of that size on the device. Equal seeds give equal weights."""
        return load_model(self.folder(size, seed=seed), dtype=dtype, device=device or self.device)

    def engine(
        self, model: PreTrainedModel, size: BenchSize, *, version: Version = 0
    ) -> EmbeddedEngine:
        return EmbeddedEngine(
            model,
            tokenizer=Tokenizer.load(self.folder(size)),
            name="doctor",
            receiver=receiver(),
            record=record_nothing,
            max_running=max(size.running),
            max_batch_tokens=size.micro_batch,
            max_context=size.context,
            version=version,
        )

    def segment(self) -> str:
        """A name for shared memory that no other process has."""
        return f"{self.prefix}{secrets.token_hex(4)}"

    def seconds(self, deed: Callable[[], object], *, rounds: int = 3) -> float:
        """The median of so many rounds of a deed, with all that it has left to the device. One round
        before them does not count.
        """
        taken: list[float] = []
        for _ in range(rounds + 1):
            self.wait()
            began = time.perf_counter()
            deed()
            self.wait()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[1:])

    def wait(self) -> None:
        """Waits until the device has done all that it was given."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


def _make_model(folder: Path, size: BenchSize, *, seed: int) -> None:
    """Writes a model with its tokenizer into the folder."""
    tokenizer = folder.with_suffix(".tokenizer")
    write_byte_tokenizer(tokenizer)
    model = make_model(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_layers=size.layers,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        max_context=size.context,
        seed=seed,
        dtype="float32",
    )
    if size is SMALL:
        _speak_up(model)
    export_model(model, tokenizer, folder)


def _speak_up(model: PreTrainedModel) -> None:
    """Makes what layers add larger. Else a small model whose embeddings are tied repeats its last
    token, whatever its weights.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(4)


def policy_trainer(
    model: PreTrainedModel,
    size: BenchSize,
    *,
    compute_dtype: torch.dtype | None = None,
    activation_checkpointing: bool = False,
    compiled: bool = False,
    ranks: Ranks | None = None,
    device: torch.device | None = None,
) -> PolicyTrainer:
    """A trainer with the default loss."""
    scale = Scale(
        micro_batch_tokens=size.micro_batch,
        compute_dtype=compute_dtype,
        activation_checkpointing=activation_checkpointing,
        compile=compiled,
    )
    return PolicyTrainer(
        model,
        Objective(),
        scoring=Scoring(),
        schedule=Schedule(),
        adam=Adam(LEARNING_RATE),
        scale=scale,
        ranks=ranks,
        device=device,
    )


def requests(
    size: BenchSize, number: int, *, answer: int | None = None, first: int = 0
) -> list[GenerateRequest]:
    """So many requests with seeds and prompts of their own, for exactly `answer` tokens."""
    made: list[GenerateRequest] = []
    for index in range(first, first + number):
        prompt = np.random.default_rng(index).integers(0, 256, PROMPT)
        sampling = SamplingParams(max_tokens=answer or size.answer, ignore_eos=True, seed=index)
        ids = tuple(prompt.tolist())
        made.append(GenerateRequest(f"doctor-{index}", ids, PROMPT, sampling, seeded=True))
    return made


def batch(size: BenchSize, version: Version) -> PackedBatch:
    """A batch of random tokens and rewards."""
    draw = np.random.default_rng(version)
    num_rows = size.groups * GROUP
    length = PROMPT + size.answer
    prompts = np.repeat(draw.integers(0, 256, (size.groups, PROMPT)), GROUP, axis=0)
    answers = draw.integers(0, 256, (num_rows, size.answer))
    tokens = np.concatenate([prompts, answers], axis=1).astype(np.int32).ravel()
    return PackedBatch(
        lease=1,
        train_version=version,
        token_ids=tokens,
        loss_mask=np.tile(np.arange(length) >= PROMPT, num_rows),
        logprobs=np.full(len(tokens), -np.log(size.vocabulary), np.float32),
        versions=np.full(len(tokens), version, np.int32),
        kv_versions=np.full(len(tokens), version, np.int32),
        row_offsets=np.arange(0, len(tokens) + 1, length, dtype=np.int32),
        row_rollout=np.arange(num_rows, dtype=np.int32),
        rewards=draw.integers(0, 4, num_rows).astype(np.float32),
        rollout_group=np.repeat(np.arange(size.groups), GROUP).astype(np.int32),
        truncated=np.zeros(num_rows, np.bool_),
    )


@torch.no_grad()
def plain_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """The log-probability at temperature 1 of each output token, by the model's own forward over
    all tokens before it.
    """
    row = np.array([*prompt, *output], dtype=np.int64)
    found = own_logprobs(model, row[:-1], row[1:], temperature=1.0)
    return found[len(prompt) - 1 :].cpu().double().numpy()


def most(one: Sequence[float] | np.ndarray, other: Sequence[float] | np.ndarray) -> float:
    """The largest difference between two lists of equal length."""
    difference = np.abs(np.asarray(one, dtype=np.float64) - np.asarray(other, dtype=np.float64))
    return float(difference.max())


def change(model: PreTrainedModel) -> None:
    """Changes all weights, because a version that an engine serves already is not fetched."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
