"""The memory that a run takes, process by process, estimated before anything is started.
`benchmarks/ways.py` measures the numbers that it follows from.

An item is certain, or it is the worst case: every slot full, every rollout as long as it can be. A
process takes the sum of its items.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from midflight.config.agent import SINGLE_TURN, agent_of, is_built_in
from midflight.config.derived import (
    ROW_BYTES_PER_TOKEN,
    batch_rollouts,
    buffer_bytes,
    buffer_groups,
    engines_option,
    handed_bytes,
    in_flight,
    num_engines,
    num_workers,
    served_dtype,
    trained_parameters,
)
from midflight.config.disk import held_versions
from midflight.config.environment import EnvironmentSection
from midflight.config.loss import ObjectiveSection
from midflight.config.sections import Config
from midflight.config.sources import num_draws
from midflight.models.sizes import ModelSizes, element_bytes, sizes_of

TORCH_PROCESS_BYTES = 320 * 2**20
"""The memory of a process that has imported torch and transformers and run a model once, measured
on Linux with the CPU build.
"""
SERVER_BYTES = 1900 * 2**20
"""A vLLM or SGLang server on a CPU before it has weights, keys and values: both measured at about
this.
"""
COMPANION_BYTES = 110 * 2**20
"""Our process beside a server: without torch."""
ROLLOUT_PROCESS_BYTES = 76 * 2**20
DATASETS_BYTES = 62 * 2**20
"""A rollout process that draws tasks from datasets of reasoning-gym takes this on top."""
LOOP_WORKER_BYTES = 46 * 2**20
"""A worker of the built-in loop. The modules that rewards and tools import come on top."""
AGENT_WORKER_BYTES = 70 * 2**20
"""A worker with the SDK, from which agents get their client. The modules that agents import come on
top.
"""
LAUNCHER_BYTES = 57 * 2**20
TOKENIZER_BYTES = 850
"""A process that makes texts of tokens takes this for each token of the vocabulary: its text, its
merge and their tables. Measured with 49,152.
"""
MADE_OPTIONS = (
    "model.hidden_size",
    "model.intermediate_size",
    "model.num_layers",
    "model.num_heads",
    "model.num_kv_heads",
)
"""Options that make a made model larger."""
COMPARED_BYTES = 490
"""A token with its number, as two tokenizers are compared. Measured with 49,152."""
DRAWN_BYTES = 2800
"""A task of a dataset with its entry, measured on sums of five to nine terms."""
LOGIT_COPIES = 4
"""Logits, their log-softmax and the gradients of both."""
GATHERED_COPIES = 4
"""FSDP gathers weights and gradients on a rank, and needs a buffer for each of the two."""
LOGITS_AT_ONCE = 2**24
"""The most logits that the trainer makes at a time (`trainer.model.scores.CHUNK`)."""
SCORED_AT_ONCE = 2**26
"""The most logits that a teacher makes at a time (`engines.embedded.scoring.MAX_LOGITS`). They are
there twice, also as their log-softmax, and three times at another temperature than 1.
"""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of the estimate. `num_bytes` is for all processes of that kind together."""

    where: str
    """The kind of process: `trainer`, `engines`, `teacher`, `rollout`, `workers`, `launcher`; or
    `shared memory`, which belongs to none.
    """
    what: str
    num_bytes: int
    options: tuple[str, ...] = ()
    """Options that make it larger, the one that matters most first."""
    is_certain: bool = True
    """True if it is taken in any case. If not, it is the worst case: every slot full, every rollout
    as long as can be.
    """
    on_gpu: bool = False
    sure_bytes: int = 0
    """The bytes of it that are taken in any case, if it is not certain."""

    @property
    def least_bytes(self) -> int:
        """The bytes that are taken in any case: all of a certain item."""
        return self.num_bytes if self.is_certain else self.sure_bytes


def total_bytes(items: Sequence[MemoryItem]) -> int:
    return sum(item.num_bytes for item in items)


def least_bytes(items: Sequence[MemoryItem]) -> int:
    """Returns the bytes of these items that are taken in any case."""
    return sum(item.least_bytes for item in items)


def longest_row(config: Config, longest_prompt: int | None) -> int:
    """The most tokens that a rollout can have. With one turn these are prompt and answer, if
    prompts were measured; else they are the whole context.
    """
    if longest_prompt is None or not _has_one_turn(config.environment):
        return config.model.max_context
    return min(config.model.max_context, longest_prompt + config.environment.max_tokens)


def batch_tokens(config: Config, longest_prompt: int | None) -> int:
    """The most tokens that a batch can have if rollouts of a group share their prompt and have one
    turn.
    """
    rollouts = batch_rollouts(config.rollout)
    row = longest_row(config, longest_prompt)
    if longest_prompt is None or not _has_one_turn(config.environment):
        return rollouts * row
    prompt = min(longest_prompt, row)
    return config.rollout.groups_per_step * prompt + rollouts * (row - prompt)


def _has_one_turn(environment: EnvironmentSection) -> bool:
    """True if a rollout is one answer. The built-in loop ends with the first answer that calls no
    tool.
    """
    if agent_of(environment) == SINGLE_TURN:
        return True
    return is_built_in(environment) and not environment.tools and not environment.mcp


def memory_estimate(
    config: Config, sizes: ModelSizes, *, longest_prompt: int | None = None
) -> tuple[MemoryItem, ...]:
    """The worst case of each part. `longest_prompt` is the number of tokens of the longest prompt,
    if prompts were looked at.
    """
    longest = longest_row(config, longest_prompt)
    return (
        *_trainer_memory(config, sizes, longest_prompt=longest_prompt),
        *_engines_memory(config, sizes, longest=longest, trains=longest_prompt is not None),
        *_teacher_memory(config, longest=longest),
        *_published_memory(config, sizes),
        *_rollout_memory(config, sizes, longest=longest),
    )


# --- The trainer ----------------------------------------------------------------------------------


def _trainer_memory(
    config: Config, sizes: ModelSizes, *, longest_prompt: int | None
) -> Iterator[MemoryItem]:
    t = config.trainer
    element = element_bytes(config.model.dtype)
    ranks = t.ranks
    on_gpu = t.device != "cpu"
    model = model_options(config)
    weights = sizes.num_parameters * element
    trained = trained_parameters(config, sizes) * element
    # Adapters come beside the weights. A warm start trains the weights first.
    added = 0 if config.lora.rank is None else trained
    optimised = weights if config.warm_start.is_made else trained
    yield MemoryItem(
        "trainer", f"{ranks} x the process", ranks * TORCH_PROCESS_BYTES, ("trainer.ranks",)
    )
    yield MemoryItem(
        "trainer",
        "weights, gradients and AdamW's two moments",
        weights + added + 3 * optimised,
        model,
        on_gpu=on_gpu,
    )
    if config.objective.kl_coefficient > 0:
        yield MemoryItem("trainer", "the reference's weights", weights, model, on_gpu=on_gpu)
    has_critic = config.objective.advantage == "gae"
    if has_critic:
        yield MemoryItem(
            "trainer",
            "the critic's weights, gradients and moments",
            weights + added + 3 * trained,
            model,
            on_gpu=on_gpu,
        )
    if on_gpu and config.engine.takes_turns:
        yield MemoryItem(
            "trainer",
            "AdamW's two moments, while engines generate",
            (1 + has_critic) * 2 * trained,
            model,
        )
    yield from _activations_memory(config, sizes, longest_prompt)
    if ranks > 1:
        table = sizes.vocab_size * sizes.hidden_size
        gathered = element * (table + 2 * sizes.num_layer_parameters)
        yield MemoryItem(
            "trainer",
            f"the table and two layers, which each of {ranks} ranks gathers",
            GATHERED_COPIES * ranks * gathered,
            (*model, "trainer.ranks"),
            on_gpu=on_gpu,
        )
    is_put_together = ranks > 1 or served_dtype(config) != config.model.dtype
    made_anew = config.weights.delta * (1 + is_put_together)
    if made_anew:
        yield MemoryItem(
            "trainer",
            "the newest version as it is served",
            made_anew * handed_bytes(config, sizes),
            model,
        )


def _activations_memory(
    config: Config, sizes: ModelSizes, longest_prompt: int | None
) -> Iterator[MemoryItem]:
    """Activations, and the copies that a checkpoint is written from. Both count, also where no step
    is under way meanwhile: a trainer on a CPU grows by the copies at its first checkpoint, because
    malloc keeps the memory of the activations before it (measured).

    Rollouts of a group whose rewards are alike have no advantage, hence no backward pass. The least
    is a step of one group whose rewards differ, with answers of one token.
    """
    trainer = config.trainer
    most = min(trainer.micro_batch_tokens, batch_tokens(config, longest_prompt))
    fewest = config.rollout.group_size
    if _all_rows_train(config.objective):
        fewest = batch_rollouts(config.rollout)
    fewest = min(most, fewest)
    activations = trainer.ranks * activation_bytes(config, sizes, most)
    sure_bytes = trainer.ranks * activation_bytes(config, sizes, fewest)
    has_critic = config.objective.advantage == "gae"
    copies = 3 * trained_parameters(config, sizes) * element_bytes(config.model.dtype)
    copies *= 1 + has_critic
    yield MemoryItem(
        "trainer",
        "a checkpoint on its way to the disk",
        copies,
        model_options(config),
    )
    yield MemoryItem(
        "trainer",
        f"activations of {trainer.ranks} x a micro-batch of {most} tokens; fewer if answers are "
        "short or few rewards differ",
        activations,
        ("trainer.micro_batch_tokens", "trainer.ranks"),
        is_certain=False,
        sure_bytes=sure_bytes,
        on_gpu=trainer.device != "cpu",
    )


def _all_rows_train(objective: ObjectiveSection) -> bool:
    """True if rollouts have a backward pass whether or not their group's rewards differ."""
    added = (
        objective.kl_coefficient,
        objective.behaviour_coefficient,
        objective.entropy_coefficient,
    )
    return objective.advantage == "gae" or any(added)


def moved_bytes(config: Config, sizes: ModelSizes, *, critics: bool = False) -> int:
    """The bytes of gradients and AdamW's two moments of the policy, or of the critic, all ranks
    together: what is on a GPU in a step alone, where engines and trainer take turns. A warm start
    of the policy moves all its weights.
    """
    optimised = trained_parameters(config, sizes)
    if config.warm_start.is_made and not critics:
        optimised = sizes.num_parameters
    return 3 * optimised * element_bytes(config.model.dtype)


def activation_bytes(config: Config, sizes: ModelSizes, tokens: int) -> int:
    """The bytes that a micro-batch takes: the numbers that the backward pass needs of each layer,
    the logits that are made at once, and the product of the largest matrix.
    """
    kept = tokens * kept_of_token(config, sizes)
    logits = LOGIT_COPIES * min(sizes.vocab_size * tokens, LOGITS_AT_ONCE)
    table = sizes.vocab_size * sizes.hidden_size
    element = element_bytes(config.model.dtype)
    # Logits and the table are in float32 at least.
    return element * kept + max(4, element) * (logits + table)


def kept_of_token(config: Config, sizes: ModelSizes) -> int:
    """The numbers of a token that the backward pass needs: those that all layers keep, and about as
    many as one layer keeps while its gradients are made.
    """
    per_layer = sizes.activations_per_layer
    if config.lora.rank is not None:
        # The output of a product is free again when its adapter's output is added, but kept numbers
        # lie between: malloc gives none of it back (measured).
        per_layer += sizes.outputs_per_layer
    if config.trainer.activation_checkpointing:
        return sizes.num_layers * sizes.hidden_size + per_layer
    return (sizes.num_layers + 1) * per_layer


# --- Engines --------------------------------------------------------------------------------------


def _engines_memory(
    config: Config, sizes: ModelSizes, *, longest: int, trains: bool
) -> Iterator[MemoryItem]:
    """`trains`: versions come, and keys and values that older ones computed are forgotten."""
    e = config.engine
    how_many = engines_option(config)
    number = num_engines(e)
    if e.kind == "embedded":
        each = TORCH_PROCESS_BYTES + sizes.vocab_size * TOKENIZER_BYTES
    elif e.urls:
        each = COMPANION_BYTES
    else:
        each = COMPANION_BYTES + SERVER_BYTES
    # Servers that others started take their memory whether we run or not.
    started = 0 if e.urls else number
    on_gpu = e.device != "cpu"
    embedded = e.kind == "embedded"
    row = longest * sizes.kv_bytes_per_token(served_dtype(config))
    slots = e.max_running * row
    kept = number * e.prefix_mb * 2**20
    if trains:
        of_one_version = in_flight(config) + batch_rollouts(config.rollout)
        kept = min(kept, of_one_version * (1 + e.prefix_age) * row)
    yield MemoryItem("engines", f"{number} x the process", number * each, (how_many,))
    yield MemoryItem(
        "engines",
        "weights, live and staged",
        _weights_memory(config, sizes),
        (how_many, *model_options(config)),
        on_gpu=on_gpu,
    )
    yield MemoryItem(
        "engines",
        f"keys and values: {started} x {e.max_running} slots of {longest} tokens",
        slots * started,
        ("engine.max_running", "model.max_context", how_many),
        is_certain=e.kind == "vllm" and not on_gpu,  # vLLM takes all of it at its start
        on_gpu=on_gpu,
    )
    if on_gpu and e.takes_turns:
        yield MemoryItem(
            "engines",
            "weights, while the trainer steps",
            number * sizes.weight_bytes(served_dtype(config)),
            (how_many, *model_options(config)),
        )
    if embedded:
        yield MemoryItem(
            "engines",
            "kept keys and values of requests that have ended",
            kept,
            ("engine.prefix_mb", how_many),
            is_certain=False,
            on_gpu=on_gpu,
        )
        yield MemoryItem(
            "engines",
            f"what a step of {e.max_batch_tokens} tokens computes with",
            number * step_bytes(config, sizes),
            ("engine.max_batch_tokens", how_many),
            is_certain=False,
            on_gpu=on_gpu,
        )


def step_bytes(config: Config, sizes: ModelSizes) -> int:
    """The bytes that an engine's step computes with. They are the states and products of one layer
    for all tokens, and a row of logits for each request.
    """
    e = config.engine
    heads = sizes.num_heads_of_product * sizes.head_dim
    layer = 4 * sizes.hidden_size + heads + 4 * sizes.intermediate_size
    numbers = e.max_batch_tokens * layer + e.max_running * sizes.vocab_size
    return element_bytes(served_dtype(config)) * numbers


def _weights_memory(config: Config, sizes: ModelSizes) -> int:
    """Returns the bytes of the weights of all engines. Differences between versions take the size
    of the tensors that they change.
    """
    handed = handed_bytes(config, sizes)
    if config.engine.kind == "embedded":
        # The version that it serves and the one that comes.
        each = sizes.weight_bytes(served_dtype(config)) + handed + _packs(config, sizes)
    else:
        each = _weights_beside_server(config, sizes, handed)
    return num_engines(config.engine) * (each + config.weights.delta * handed)


def _packs(config: Config, sizes: ModelSizes) -> int:
    """The copies of weights that one engine of our own multiplies with: of the version that it
    serves, and of the one that comes. Adapters leave the weights as they are.
    """
    if config.engine.device != "cpu":
        return 0
    packed = sizes.packed_bytes(served_dtype(config))
    return packed if config.lora.rank is not None else 2 * packed


def _weights_beside_server(config: Config, sizes: ModelSizes, handed: int) -> int:
    """The weights of one vLLM or SGLang server; those of a server of `engine.urls` are not counted.

    Beside it lie two folders that it loads from, and the version that is fetched or merged next.
    With adapters they lie in files and in the server's memory instead.
    """
    lora = config.lora
    served = sizes.weight_bytes(served_dtype(config))
    own = 0 if config.engine.urls else served
    if lora.rank is not None and not lora.merged:
        return own + (2 * (config.rollout.max_staleness + 2) + 1) * handed
    return own + (3 + lora.merged) * served


def _teacher_memory(config: Config, *, longest: int) -> Iterator[MemoryItem]:
    """`longest` is the number of tokens of the longest row."""
    if config.distillation.teacher is None:
        return
    sizes = sizes_of(config.distillation.teacher)
    dtype = served_dtype(config)
    on_gpu = config.engine.device != "cpu"
    whole_batch = batch_rollouts(config.rollout) * longest
    tokens = min(max(config.engine.max_batch_tokens, longest), whole_batch)
    copies = 2 if config.environment.temperature == 1 else 3
    logits = copies * 4 * min(tokens * sizes.vocab_size, SCORED_AT_ONCE)
    layer = tokens * element_bytes(dtype) * (14 * sizes.hidden_size + 3 * sizes.intermediate_size)
    model = ("distillation.teacher",)
    yield MemoryItem(
        "teacher", "the process", TORCH_PROCESS_BYTES + sizes.vocab_size * TOKENIZER_BYTES
    )
    weights = sizes.weight_bytes(dtype)
    if not on_gpu:
        weights += sizes.packed_bytes(dtype)
    yield MemoryItem("teacher", "weights", weights, model, on_gpu=on_gpu)
    batch = ("engine.max_batch_tokens",)
    kept = tokens * sizes.kv_bytes_per_token(dtype)
    yield MemoryItem(
        "teacher",
        f"keys, values and states of {tokens} tokens",
        kept + layer,
        batch,
        is_certain=False,
        on_gpu=on_gpu,
    )
    yield MemoryItem(
        "teacher", "logits that are scored at once", logits, batch, is_certain=False, on_gpu=on_gpu
    )


# --- What lies between them -----------------------------------------------------------------------


def _published_memory(config: Config, sizes: ModelSizes) -> Iterator[MemoryItem]:
    by_memory = config.weights.transport == "shared_memory"
    versions = held_versions(config) * handed_bytes(config, sizes)
    yield MemoryItem(
        "shared memory", "published versions", versions, model_options(config), is_certain=by_memory
    )


def worker_bytes(environment: EnvironmentSection) -> int:
    """The memory of one worker before it runs an agent."""
    return LOOP_WORKER_BYTES if is_built_in(environment) else AGENT_WORKER_BYTES


def _rollout_memory(config: Config, sizes: ModelSizes, *, longest: int) -> Iterator[MemoryItem]:
    r = config.rollout
    shards = config.gateway.shards
    workers = num_workers(config.environment)
    rollouts = buffer_groups(r) * r.group_size
    each = longest * ROW_BYTES_PER_TOKEN
    waiting = min(rollouts * each, buffer_bytes(shards=1))
    process = ROLLOUT_PROCESS_BYTES + sizes.vocab_size * TOKENIZER_BYTES
    if any(source.dataset is not None for source in config.environment.sources):
        process += DATASETS_BYTES
    yield MemoryItem("rollout", f"{shards} x the process", shards * process, ("gateway.shards",))
    yield MemoryItem(
        "rollout",
        f"up to {rollouts + in_flight(config)} trajectories running and waiting",
        waiting + in_flight(config) * each,
        ("rollout.max_in_flight", "rollout.buffer_groups", "model.max_context"),
        is_certain=False,
    )
    yield from _tasks_memory(config)
    if workers:
        taken = workers * worker_bytes(config.environment)
        yield MemoryItem("workers", f"{workers} x the process", taken, ("environment.workers",))
    yield MemoryItem("launcher", "the process", LAUNCHER_BYTES)
    if config.distillation.teacher is not None:
        compared = sizes.vocab_size + sizes_of(config.distillation.teacher).vocab_size
        yield MemoryItem(
            "launcher",
            "tokens of teacher and student, which are compared",
            compared * COMPARED_BYTES,
        )


def _tasks_memory(config: Config) -> Iterator[MemoryItem]:
    """Tasks of datasets, which are drawn before the first is tried, in each rollout process and for
    a warm start. Tasks of rows are not drawn.
    """
    drawing = config.gateway.shards
    if config.warm_start.is_made and config.warm_start.data is None:
        drawing += 1
    for number, source in enumerate(config.environment.sources):
        if source.dataset is not None:
            at = f"environment.sources.{number}"
            yield MemoryItem(
                "rollout",
                f"drawn tasks of {source.dataset}",
                drawing * num_draws(source) * DRAWN_BYTES,
                (f"{at}.size", f"{at}.heldout"),
            )


def model_options(config: Config) -> tuple[str, ...]:
    """The options that make the model larger."""
    return ("model.path",) if config.model.path is not None else MADE_OPTIONS
