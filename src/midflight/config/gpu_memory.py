"""The memory of each GPU of a run at its fullest moment, estimated before anything is started, for
GPUs that options describe. `memory` has the items of our own processes.

A GPU has two moments: the start, at which one trainer rank may make a warm start with the whole
model, and a step. Where engines and trainer take turns (`engine.share = "time"`) it has two more:
engines generate, and before that they take a version while they have no keys. Ranks get their rows of the model from the first rank's host memory, and give them
back bucket by bucket, so that no rank has the whole model on its GPU at another time, and no moment
takes as much as a step. All that is on a GPU at one moment is added up. Nothing of it was measured
on a GPU.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from midflight.config.derived import (
    handed_bytes,
    model_sizes,
    num_engines,
    served_dtype,
)
from midflight.config.devices import ServerSection
from midflight.config.engine import EngineSection
from midflight.config.gpus import DescribedGpus
from midflight.config.memory import MemoryItem, memory_estimate, moved_bytes, step_bytes
from midflight.config.seats import DeviceAssignment, by_handles, server_of, server_size
from midflight.config.sections import Config
from midflight.models.sizes import BUCKET_BYTES, ModelSizes, element_bytes

CUDA_BYTES = 2**30
"""CUDA's context of a process, with the buffers of cuBLAS and NCCL. It is assumed."""
SHARES = {"vllm": 0.9, "sglang": 0.88}
"""The part of a GPU that a server takes unless `engine.arguments` say otherwise. vLLM's is its
default. SGLang chooses by the GPU; this is a usual choice.
"""
SHARE_OPTIONS = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}
_SHARE = re.compile(r"(?:--gpu-memory-utilization|--mem-fraction-static)[= ]([\d.]+)")


class Moment(StrEnum):
    START = "at its start"
    STEP = "in a step"
    TAKE = "as engines take a version"
    GENERATE = "while engines generate"


ALWAYS = frozenset(Moment)
TURNS = (Moment.STEP, Moment.TAKE, Moment.GENERATE)
"""The moments of a step of training in turns, in their order."""
BETWEEN = frozenset({Moment.TAKE, Moment.GENERATE})
"""The moments of the engines' turn."""


@dataclass(frozen=True, slots=True)
class GpuItem:
    """One thing that a process keeps on each of its GPUs."""

    who: str
    what: str
    num_bytes: int
    moments: frozenset[Moment] = ALWAYS
    remedy: str = "choose GPUs with more memory"
    """Advice to the user who needs it to be smaller."""

    @property
    def part(self) -> str:
        """The kind of its process: all trainer ranks are the trainer, all engines an engine."""
        return self.who.rstrip("0123456789")


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """One GPU with all that lies on it."""

    host: str
    device: int
    items: Sequence[GpuItem]

    @property
    def name(self) -> str:
        return f"GPU {self.device} of {self.host}"

    @property
    def fullest(self) -> Moment:
        """The moment at which most of it is taken."""
        return max(Moment, key=self.taken)

    def at(self, moment: Moment) -> Sequence[GpuItem]:
        return [item for item in self.items if moment in item.moments]

    @property
    def at_fullest(self) -> Sequence[GpuItem]:
        return self.at(self.fullest)

    def taken(self, moment: Moment) -> int:
        return sum(item.num_bytes for item in self.items if moment in item.moments)


def gpu_memory(
    config: Config, gpus: DescribedGpus, laid: Sequence[DeviceAssignment]
) -> Sequence[GpuMemory]:
    """The memory of each GPU that a process has, host by host. `laid` has the places of the
    processes.
    """
    items = defaultdict[tuple[str, int], list[GpuItem]](list)
    for part in laid:
        own = list(part_items(config, gpus, part.who))
        for device in part.devices:
            items[part.host, device] += own
    order = {part.host: number for number, part in reversed(list(enumerate(laid)))}
    places = sorted(items, key=lambda place: (order[place[0]], place[1]))
    return [GpuMemory(host, device, items[host, device]) for host, device in places]


def is_server(config: Config) -> bool:
    """True if the run starts vLLM or SGLang servers."""
    return config.engine.kind != "embedded" and not config.engine.urls


# --- What a process has on a GPU ------------------------------------------------------------------


def part_items(config: Config, gpus: DescribedGpus, who: str) -> Iterator[GpuItem]:
    """The things that the process of that name keeps on each of its GPUs."""
    sizes = model_sizes(config.model)
    estimate = [item for item in memory_estimate(config, sizes) if item.on_gpu]
    if who.startswith("trainer"):
        items = _trainer_items(config, sizes, estimate, who)
    elif who == "teacher":
        items = _own_items(who, estimate, "teacher", of=1)
    elif is_server(config):
        items = ServerMemory(config, gpus, who).items()
    else:
        items = _own_items(who, estimate, "engines", of=num_engines(config.engine))
    yield GpuItem(who, "CUDA, assumed", CUDA_BYTES)
    if config.engine.takes_turns:
        items = _in_turns(config, sizes, items)
    yield from items
    if by_handles(config) and who != "teacher":
        yield from _on_its_way(config, gpus, who, sizes)


def _on_its_way(
    config: Config, gpus: DescribedGpus, who: str, sizes: ModelSizes
) -> Iterator[GpuItem]:
    """Yields the memory that versions need on the GPU when they go by CUDA IPC. The trainer's own copy
    of the newest version is not counted: it is made only if there is room.
    """
    taking = frozenset({Moment.TAKE})
    is_trainer = who.startswith("trainer")
    in_turns = config.engine.takes_turns
    moments = ALWAYS if is_trainer or not in_turns else taking
    yield GpuItem(who, "a bucket of a version on its way", BUCKET_BYTES, moments)
    if not in_turns:
        return
    table = sizes.vocab_size * sizes.hidden_size * element_bytes(served_dtype(config))
    yield GpuItem(who, "the largest tensor on its way", table, taking)
    if not is_trainer:
        weights = ServerMemory(config, gpus, who).weights
        yield GpuItem(who, "the new weights, beside those before", weights, taking)


def _in_turns(config: Config, sizes: ModelSizes, items: Iterator[GpuItem]) -> Iterator[GpuItem]:
    """The items of a process that takes turns, each at its own moments. A teacher takes none."""
    for item in items:
        if item.who.startswith("trainer"):
            yield from _in_trainers_turn(config, sizes, item)
        elif item.who == "teacher" or item.what.startswith("what a step computes"):
            yield item  # captured graphs hold some of it while a server sleeps
        elif item.what.startswith(("weights", "versions of adapters")):
            yield replace(item, moments=BETWEEN)
        else:
            yield replace(item, moments=frozenset({Moment.GENERATE}))


def _in_trainers_turn(config: Config, sizes: ModelSizes, item: GpuItem) -> Iterator[GpuItem]:
    """Weights stay between two steps. Gradients and moments are there in a step alone."""
    if item.what == "the reference's weights":
        yield replace(item, moments=BETWEEN | item.moments)
    elif item.what.endswith("moments") and Moment.STEP in item.moments:
        critics = item.what.startswith("the critic's")
        comes = moved_bytes(config, sizes, critics=critics) // config.trainer.ranks
        whose = "the critic's " if critics else ""
        stays = item.num_bytes - comes
        yield replace(item, what=f"{whose}weights", num_bytes=stays, moments=BETWEEN | item.moments)
        yield replace(item, what=f"{whose}gradients and AdamW's two moments", num_bytes=comes)
    else:
        yield item


def _own_items(
    who: str, estimate: Sequence[MemoryItem], where: str, *, of: int
) -> Iterator[GpuItem]:
    """The items of an embedded engine or a teacher: one of so many that the estimate is for."""
    for item in estimate:
        if item.where == where:
            yield GpuItem(who, _short(item.what), item.num_bytes // of, remedy=_lowered(item))


def _short(what: str) -> str:
    """The words of an item without its numbers, which are those of all processes together."""
    return what.partition(":")[0]


def _lowered(item: MemoryItem) -> str:
    if not item.options:
        return "choose GPUs with more memory"
    option = item.options[0]
    if option in ("model.path", "distillation.teacher"):
        return "choose a smaller model, or GPUs with more memory"
    if option in ("engine.count", "engine.servers"):
        return 'set engine.kind = "vllm" with tensor_parallel in engine.servers, or a smaller model'
    return f"lower {option}"


def _trainer_items(
    config: Config, sizes: ModelSizes, estimate: Sequence[MemoryItem], who: str
) -> Iterator[GpuItem]:
    """The items of a trainer rank. The estimate is for all ranks, which share each of its items."""
    ranks = config.trainer.ranks
    weights = sizes.weight_bytes(config.model.dtype)
    in_step = frozenset({Moment.STEP})
    more_ranks = f"raise trainer.ranks ({ranks})"
    for item in estimate:
        if item.where != "trainer":
            continue
        words = item.what
        remedy = more_ranks
        if words.startswith("activations"):
            words = f"activations of {_micro_batch(words)}"
            remedy = (
                f"lower trainer.micro_batch_tokens ({config.trainer.micro_batch_tokens}), or set "
                "trainer.activation_checkpointing"
            )
        elif words.startswith("the table and two layers"):
            words = "the table and two layers, gathered"
            remedy = "choose GPUs with more memory"
        yield GpuItem(who, words, item.num_bytes // ranks, in_step, remedy)
    if who == "trainer" and ranks > 1 and config.warm_start.is_made:
        yield GpuItem(
            who,
            "the whole model with gradients and moments of the warm start, which one rank makes",
            4 * weights,
            frozenset({Moment.START}),
            "remove [warm_start], and start from a model that has learnt it",
        )


def num_models(config: Config) -> int:
    """The models of the trainer: the policy, with the reference and the critic where there are
    any.
    """
    has_reference = config.objective.kl_coefficient > 0
    has_critic = config.objective.advantage == "gae"
    return 1 + has_reference + has_critic


def _micro_batch(words: str) -> str:
    """`a micro-batch of 4096 tokens`, of the words for all ranks."""
    return words.partition(" x ")[2].partition(";")[0]


# --- A server -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerLayout:
    """The sizes over which a server is laid."""

    tensor: int
    pipeline: int
    data: int

    @property
    def num_shares(self) -> int:
        """The GPUs that share one copy of the weights."""
        return self.tensor * self.pipeline

    @property
    def num_processes(self) -> int:
        return self.num_shares * self.data


def server_layout(engine: EngineSection, server: ServerSection | None) -> ServerLayout:
    """The sizes of a server, from its command line, else from its section."""
    section = server or ServerSection()
    size = server_size(engine, server)
    if size != section.world_size:
        return ServerLayout(size, 1, 1)
    return ServerLayout(section.tensor_parallel, section.pipeline_parallel, section.data_parallel)


class ServerMemory:
    """The memory of one vLLM or SGLang server on each of its GPUs: it takes its share of the GPU at
    its start, and has keys and values in all that weights leave of it.
    """

    def __init__(self, config: Config, gpus: DescribedGpus, who: str) -> None:
        sizes = model_sizes(config.model)
        layout = server_layout(config.engine, server_of(config, who))
        dtype = served_dtype(config)
        self._config = config
        self._who = who
        self.share = memory_share(config.engine)
        self._taken = int(self.share * gpus.kind.memory_bytes)
        self.weights = sizes.weight_bytes(dtype) // layout.num_shares
        self._adapters = _adapter_bytes(config, sizes)
        self._work = step_bytes(config, sizes)
        heads = max(1, sizes.num_kv_heads // layout.tensor)
        of_token = sizes.kv_bytes_per_token(dtype) * heads // sizes.num_kv_heads
        self.row = config.model.max_context * of_token // layout.pipeline
        """The bytes of keys and values of the longest row."""

    @property
    def keys(self) -> int:
        """The bytes that are left for keys and values. They are less than 0 if nothing is."""
        return self._taken - CUDA_BYTES - self.weights - self._adapters - self._work

    def items(self) -> Iterator[GpuItem]:
        config = self._config
        wider = wider_server(config, self._who)
        yield GpuItem(self._who, "weights", self.weights, remedy=wider)
        if self._adapters:
            yield GpuItem(
                self._who, "versions of adapters", self._adapters, remedy="lower lora.rank"
            )
        yield GpuItem(
            self._who,
            "what a step computes with",
            self._work,
            remedy="lower engine.max_batch_tokens",
        )
        option = SHARE_OPTIONS[config.engine.kind]
        yield GpuItem(
            self._who,
            f"keys and values, in what is left of its share of {self.share:g}",
            max(0, self.keys),
            remedy=f"lower {option} ({self.share:g}) in engine.arguments",
        )


def memory_share(engine: EngineSection) -> float:
    """The part of each of its GPUs that a server takes."""
    found = _SHARE.search(" ".join(engine.arguments))
    return float(found[1]) if found else SHARES[engine.kind]


def _adapter_bytes(config: Config, sizes: ModelSizes) -> int:
    """The bytes of the versions of adapters that a server keeps side by side."""
    if config.lora.rank is None or config.lora.merged:
        return 0
    return (config.rollout.max_staleness + 2) * handed_bytes(config, sizes)


def wider_server(config: Config, who: str) -> str:
    layout = server_layout(config.engine, server_of(config, who))
    return f"raise tensor_parallel ({layout.tensor}) in engine.servers"
