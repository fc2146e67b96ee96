"""Options that contradict each other, which the bounds of single options cannot find."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from midflight.config.agent import agent_contradictions
from midflight.config.derived import served_dtype, trains_truncated
from midflight.config.loss import CriticSection, formula_of
from midflight.config.loss_checks import loss_contradictions
from midflight.config.seat_checks import cluster_contradictions, server_contradictions
from midflight.config.sections import Config, EngineSection
from midflight.config.sources import source_contradictions
from midflight.entries import ENTRY
from midflight.errors import nearest

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_URL = re.compile(r"https?://[^\s/?#@]+/?")


def contradictions(config: Config) -> tuple[str, ...]:
    """One sentence for each pair of options that can't both hold, with the remedy. It is empty for
    a sound configuration.
    """
    return (
        *_rollout(config),
        *_model(config),
        *_trainer(config),
        *_critic(config),
        *_distillation(config),
        *_lora(config),
        *_engine(config),
        *_places(config),
        *_observe(config),
        *cluster_contradictions(config),
        *server_contradictions(config),
    )


def _rollout(config: Config) -> Iterator[str]:
    r = config.rollout
    every = config.weights.every
    if every - 1 > r.max_staleness:
        old = (
            f"weights.every ({every}) leaves the last step before a publication tokens that are "
            f"{every - 1} versions old, and rollout.max_staleness is {r.max_staleness}"
        )
        yield (
            f"{old}; lower weights.every to at most {r.max_staleness + 1}, or raise "
            "rollout.max_staleness"
        )
    if r.buffer_groups is not None and r.buffer_groups < r.groups_per_step:
        yield (
            f"rollout.buffer_groups ({r.buffer_groups}) is less than the {r.groups_per_step} "
            "groups of one step, so no batch would ever be full; raise it to at least "
            "rollout.groups_per_step"
        )
    if r.max_in_flight is not None and r.max_in_flight < r.group_size:
        yield (
            f"rollout.max_in_flight ({r.max_in_flight}) is less than rollout.group_size "
            f"({r.group_size}), so no group could run whole; raise max_in_flight or lower "
            "group_size"
        )
    most = config.gateway.max_sessions
    if r.max_in_flight is not None and r.max_in_flight > most:
        yield (
            f"rollout.max_in_flight ({r.max_in_flight}) is more than gateway.max_sessions "
            f"({most}), beyond which rollouts are refused; lower it, or raise gateway.max_sessions"
        )
    if r.min_group_size is not None and r.min_group_size > r.group_size:
        yield (
            f"rollout.min_group_size ({r.min_group_size}) is more than rollout.group_size "
            f"({r.group_size}), so every group would be dropped; lower it"
        )


def _model(config: Config) -> Iterator[str]:
    m = config.model
    e = config.environment
    if m.path is None and m.hidden_size % m.num_heads:
        yield f"model.num_heads ({m.num_heads}) must divide model.hidden_size ({m.hidden_size})"
    elif m.path is None and (m.hidden_size // m.num_heads) % 2:
        yield (
            f"model.hidden_size / model.num_heads ({m.hidden_size // m.num_heads}) must be even, "
            "because positions rotate pairs of numbers"
        )
    if m.path is None and m.num_heads % m.num_kv_heads:
        yield f"model.num_kv_heads ({m.num_kv_heads}) must divide model.num_heads ({m.num_heads})"
    if e.max_tokens >= m.max_context:
        yield (
            f"environment.max_tokens ({e.max_tokens}) must be less than model.max_context "
            f"({m.max_context}), or no token is left for the prompt; lower max_tokens or raise "
            "max_context"
        )


def _trainer(config: Config) -> Iterator[str]:
    yield from loss_contradictions(config.objective, config.correction)
    o = config.objective
    t = config.trainer
    groups = config.rollout.groups_per_step
    if t.updates_per_step > groups:
        yield (
            f"trainer.updates_per_step ({t.updates_per_step}) is more than "
            f"rollout.groups_per_step ({groups}), and an update has a group at least; lower it"
        )
    if o.overlong_buffer > config.environment.max_tokens:
        yield (
            f"objective.overlong_buffer ({o.overlong_buffer}) is more than "
            f"environment.max_tokens ({config.environment.max_tokens}); lower it"
        )
    if t.compute_dtype == "bfloat16" and config.model.dtype == "float64":
        yield (
            'trainer.compute_dtype = "bfloat16" with model.dtype = "float64" would keep what it '
            'cannot use; set model.dtype = "float32"'
        )
    if t.compute_dtype == "bfloat16" and config.model.dtype == "bfloat16":
        yield (
            'trainer.compute_dtype = "bfloat16" is for full-precision weights, and model.dtype '
            'is "bfloat16"; set model.dtype = "float32" and engine.dtype = "bfloat16"'
        )


def _critic(config: Config) -> Iterator[str]:
    advantage = config.objective.advantage
    if advantage == "gae":
        if config.distillation.teacher is not None:
            yield (
                'objective.advantage = "gae" has no place for what distillation.teacher says of '
                "a token; choose another advantage, or remove the teacher"
            )
        return
    for name, value in config.critic:
        if value != getattr(CriticSection(), name):
            yield (
                f"critic.{name} ({value:g}) does nothing with objective.advantage = "
                f'"{advantage}"; remove it, or set objective.advantage = "gae"'
            )


def _lora(config: Config) -> Iterator[str]:
    given = [f"lora.{name}" for name in ("alpha", "targets") if getattr(config.lora, name)]
    if config.lora.rank is None and given:
        yield (
            f"{given[0]} does nothing without lora.rank; set lora.rank, or remove [lora] to "
            "train all weights"
        )
    if config.lora.rank is not None and find_spec("peft") is None:
        yield (
            f"lora.rank ({config.lora.rank}) needs PEFT, which is not installed; pip install "
            "'midflight[lora]'"
        )


def _distillation(config: Config) -> Iterator[str]:
    d = config.distillation
    if not d.rewards and d.teacher is None:
        yield (
            "distillation.rewards = false without distillation.teacher leaves nothing to learn "
            "from; name a teacher, or remove it"
        )
    if not d.rewards and not config.warm_start.is_made and _is_start(config, d.teacher):
        yield (
            f"distillation.teacher ({d.teacher}) is the model that the run begins with, so with "
            "distillation.rewards = false it agrees with the student and there is nothing to "
            "learn; let rewards count, or name another teacher"
        )
    if not d.rewards and d.teacher is not None and d.weight == 0:
        yield (
            "distillation.rewards = false with distillation.weight = 0 leaves nothing to learn "
            "from; raise the weight"
        )
    if d.teacher is not None and formula_of(config.objective, config.correction).is_per_rollout:
        yield (
            f'objective.kind = "{config.objective.kind}" takes one advantage for a whole rollout, '
            "and distillation.teacher gives one to each token; choose another objective, or remove "
            "the teacher"
        )
    if d.teacher is not None and config.correction.opsm is not None:
        yield (
            "correction.opsm goes by the sign of a whole rollout's advantage, and "
            "distillation.teacher gives one to each token; remove it"
        )
    if not d.rewards and config.rollout.drop_zero_spread:
        yield (
            "rollout.drop_zero_spread chooses groups by their rewards, which "
            "distillation.rewards = false ignores; remove one of them"
        )


def _is_start(config: Config, folder: Path | None) -> bool:
    """True if the run begins with the model in this folder."""
    if config.model.path is None or folder is None:
        return False
    return Path(config.model.path).resolve() == folder.resolve()


def _engine(config: Config) -> Iterator[str]:
    e = config.engine
    started = e.kind != "embedded" and not e.urls
    if e.guesses >= config.model.max_context:
        yield (
            f"engine.guesses ({e.guesses}) must be less than model.max_context "
            f"({config.model.max_context}); lower it"
        )
    if e.urls and e.kind == "embedded":
        yield (
            'engine.urls are of servers that run already, but engine.kind is "embedded", which '
            'is started here; set engine.kind to "vllm" or "sglang"'
        )
    if e.python is not None and not started:
        yield (
            f"engine.python ({e.python}) is for a server that is started here, and none is; "
            "remove it"
        )
    if e.arguments and not started:
        yield (
            f"engine.arguments ({' '.join(e.arguments)}) are for a server that is started here, "
            "and none is; remove them"
        )
    if e.kind != "embedded" and served_dtype(config) == "float64":
        yield (
            f'engine.kind = "{e.kind}" cannot serve float64; set engine.dtype to "float32", or '
            'engine.kind to "embedded"'
        )
    if e.deterministic:
        why = _not_deterministic(e)
        if why:
            yield f"engine.deterministic asks for what cannot be had: {why}; remove it"
    for url in e.urls:
        if not _URL.fullmatch(url):
            yield f"engine.urls must be addresses such as http://127.0.0.1:30000, got {url!r}"
    if len(set(e.urls)) < len(e.urls):
        yield (
            "engine.urls names a server twice, which would get every version twice; name each once"
        )
    if e.urls and e.count not in (1, len(e.urls)):
        yield (
            f"engine.count ({e.count}) is not the number of engine.urls ({len(e.urls)}); remove it"
        )


def _not_deterministic(engine: EngineSection) -> str:
    """Returns the reason why an engine cannot compute each answer as if it were alone, or an empty
    string if it can.
    """
    if engine.kind == "embedded":
        return (
            "the embedded engine samples by seed and position already, and has no kernels whose "
            "rounding is the same in every batch"
        )
    if engine.kind == "vllm" and engine.urls:
        return (
            "a vLLM server that runs already does not say whether it was started with "
            "VLLM_BATCH_INVARIANT=1"
        )
    if engine.device == "cpu" and not engine.urls:
        name = "vLLM" if engine.kind == "vllm" else "SGLang"
        return f"{name} has such kernels for GPUs alone, and engine.device is cpu"
    return ""


def _places(config: Config) -> Iterator[str]:
    if config.environment.sampling.truncates_the_policy:
        yield from _truncation(config)
    for key, device in (
        ("engine.device", config.engine.device),
        ("trainer.device", config.trainer.device),
    ):
        if not _DEVICE.fullmatch(device):
            yield f"{key} must be 'cpu', 'cuda' or 'cuda:N', got {device!r}"
    yield from agent_contradictions(config)
    warm = config.warm_start
    learns_to_accuracy = warm.target_accuracy is not None and warm.data is None
    yield from source_contradictions(
        config.environment.sources, config.curriculum, learns_to_accuracy=learns_to_accuracy
    )
    if config.gateway.port > 65535:
        yield f"gateway.port must be <= 65535, got {config.gateway.port}; 0 takes a free port"


def _truncation(config: Config) -> Iterator[str]:
    """Contradictions of a policy that samples from a part of the vocabulary."""
    if config.engine.kind != "embedded":
        yield (
            "environment.top_p, top_k and min_p need to know what was kept, which engine.kind = "
            f'"{config.engine.kind}" does not say; remove them'
        )
    if not trains_truncated(config, trainer_is_ours=True):
        has_teacher = config.distillation.teacher is not None
        why = "distillation.teacher" if has_teacher else "correction.sampling_masks = false"
        yield (
            f"environment.top_p, top_k and min_p leave nothing to train with {why}, which keeps "
            "such turns out of the loss; remove one of both"
        )


TRACKERS = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "otel": "opentelemetry.exporter.otlp.proto.http",
}
"""The package that each known tracker needs. The extra of the same name installs it."""


def _observe(config: Config) -> Iterator[str]:
    names = config.observe.trackers
    for name in names:
        if name not in TRACKERS and not ENTRY.fullmatch(name):
            what = f"there are {', '.join(TRACKERS)}, and `module:Class` of your own"
            yield (
                f"observe.trackers names {name!r}, which is no tracker: "
                f"{what}.{nearest(name, TRACKERS)}"
            )
        elif name in TRACKERS and not _is_installed(TRACKERS[name]):
            yield (
                f"observe.trackers names {name!r}, and the package {TRACKERS[name]} is not "
                f"installed; pip install 'midflight[{name}]'"
            )
    if len(set(names)) < len(names):
        yield (
            f"observe.trackers names one twice ({', '.join(names)}), and would tell it "
            "everything twice; name each once"
        )


def _is_installed(package: str) -> bool:
    """True if there is such a package with a file. A folder that a tracker wrote here would be
    found too, but as a package without a file.
    """
    try:
        found = find_spec(package)
    except ModuleNotFoundError:  # a package around it is missing
        return False
    return found is not None and found.origin is not None
