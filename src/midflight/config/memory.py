"""How much memory a run will take, estimated from the configuration alone: for `--dry-run`, before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from midflight.config.derived import buffer_groups, in_flight, num_engines, served_dtype
from midflight.config.sections import Config, EngineSection, ModelSection
from midflight.models.sizes import ModelSizes, element_bytes, sizes_of

MADE_VOCABULARY = 262
"""Tokens of the tokenizer of made models: 256 bytes and 6 special ones."""
TORCH_PROCESS_BYTES = 320 * 2**20
"""A process that has imported torch and transformers and run a model once, measured on Linux with the CPU build."""
SERVER_BYTES = 1900 * 2**20
"""A vLLM or SGLang server on a CPU before it has weights, keys and values: both measured at about this."""
COMPANION_BYTES = 110 * 2**20
"""Our process beside a server: without torch."""
ROLLOUT_PROCESS_BYTES = 160 * 2**20
LAUNCHER_BYTES = 50 * 2**20
ROW_BYTES_PER_TOKEN = 4 + 1 + 1 + 4 + 4 + 4
"""Of a trajectory's row: ids, two masks, log-probabilities, two versions."""
ACTIVATIONS_PER_LAYER = 14
"""Vectors of hidden size kept per token and layer for the backward pass, the feed-forward's counted separately."""
LOGIT_COPIES = 4
"""Logits, their log-softmax and the gradients of both."""
LOGITS_AT_ONCE = 2**24
"""The most of them that the trainer makes at a time (`trainer.head.CHUNK`)."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of the estimate. `num_bytes` is for all processes of that kind together."""

    where: str
    what: str
    num_bytes: int


def model_sizes(model: ModelSection) -> ModelSizes:
    """Of the folder at `path` (`ModelNotFound` if there is none), else of the model that will be made."""
    if model.path is not None:
        return sizes_of(model.path)
    return ModelSizes(
        vocab_size=MADE_VOCABULARY,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.hidden_size // model.num_heads,
        max_context=model.max_context,
    )


def memory_estimate(config: Config, sizes: ModelSizes) -> tuple[MemoryItem, ...]:
    """Worst case of each part: every slot full to `max_context`, every waiting rollout as long as can be."""
    m, e, t, r = config.model, config.engine, config.trainer, config.rollout
    element, served_element = element_bytes(m.dtype), element_bytes(served_dtype(config))
    weights, served = sizes.num_parameters * element, sizes.num_parameters * served_element
    trained = sizes.num_parameters if config.lora.rank is None else sizes.num_adapter_parameters(config.lora.rank)
    handed = trained * served_element
    added = 0 if config.lora.rank is None else trained * element  # adapters beside the weights; a warm start trains the weights first
    optimised = trained * element if config.warm_start.target_accuracy is None else weights
    slots = e.max_running * m.max_context * sizes.kv_bytes_per_token(served_dtype(config))
    engines = 0 if e.urls else e.count  # servers that others started take their memory whether we run or not
    per_token = sizes.num_layers * (ACTIVATIONS_PER_LAYER * sizes.hidden_size + 3 * sizes.intermediate_size)
    logits = LOGIT_COPIES * min(sizes.vocab_size * t.micro_batch_tokens, LOGITS_AT_ONCE)
    activations = t.ranks * element * (per_token * t.micro_batch_tokens + logits)
    rollouts = buffer_groups(r) * r.group_size + in_flight(r)
    delta = config.weights.delta
    held = 0 if config.weights.transport == "file" else 4 if delta else 3  # live, under way, waiting; with differences see `DeltaPublisher`
    has_critic = config.objective.advantage == "gae"
    converted = served_dtype(config) != m.dtype
    return (
        MemoryItem("trainer", "weights, gradients and AdamW's two moments", weights + added + 3 * optimised),
        MemoryItem("trainer", f"activations of {t.ranks} x a micro-batch of {t.micro_batch_tokens} tokens", activations),
        *([MemoryItem("trainer", "the reference's weights", weights)] * (config.objective.kl_coefficient > 0)),
        MemoryItem("trainer", "the newest version as it is served", (delta + converted) * handed),
        MemoryItem("engines", "weights, live and staged", _weights(config, served=served, handed=handed)),
        MemoryItem("engines", f"keys and values: {engines} x {e.max_running} slots of {m.max_context} tokens", slots * engines),
        *([MemoryItem("trainer", "the critic's weights, gradients and moments", weights + added + 3 * trained * element)] * has_critic),
        *_teacher(config),
        MemoryItem("weights", "published versions in memory", held * handed),
        MemoryItem("rollout", f"up to {rollouts} trajectories running and waiting", rollouts * m.max_context * ROW_BYTES_PER_TOKEN),
        MemoryItem("processes", "interpreters and libraries", _processes(e, ranks=t.ranks)),
    )


def total_bytes(items: tuple[MemoryItem, ...]) -> int:
    return sum(item.num_bytes for item in items)


def _teacher(config: Config) -> tuple[MemoryItem, ...]:
    if config.distillation.teacher is None:
        return ()
    weights = sizes_of(config.distillation.teacher).weight_bytes(served_dtype(config))
    return (MemoryItem("teacher", "process and weights", TORCH_PROCESS_BYTES + weights),)


def _weights(config: Config, *, served: int, handed: int) -> int:
    """Of all engines. Beside a server: two folders that it loads from, and what is fetched or merged next; one more where it starts
    with merged adapters. For differences: what they change."""
    engine = config.engine
    folders = (3 if engine.urls else 4) + (config.lora.rank is not None)
    each = served + handed if engine.kind == "embedded" else folders * served
    return num_engines(engine) * (each + config.weights.delta * handed)


def _processes(engine: EngineSection, *, ranks: int) -> int:
    ours = ranks * TORCH_PROCESS_BYTES + ROLLOUT_PROCESS_BYTES + LAUNCHER_BYTES
    if engine.kind == "embedded":
        return ours + engine.count * TORCH_PROCESS_BYTES
    return ours + num_engines(engine) * (COMPANION_BYTES + (0 if engine.urls else SERVER_BYTES))
