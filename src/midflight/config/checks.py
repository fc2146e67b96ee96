"""What single bounds cannot say: options that contradict each other are refused, and surprising
ones get a note. And the loss that a configuration asks for as text, which is printed at the start,
so that nothing is counted twice unseen.
"""

import math
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from midflight.config import formulas
from midflight.config.agent import agent_contradictions
from midflight.config.derived import (
    batch_bytes,
    batch_rollouts,
    context_notes,
    engine_slots,
    in_flight,
    served_dtype,
    trains_truncated,
)
from midflight.config.formulas import MASKS, OBJECTIVE_OPTIONS, OBJECTIVES, WEIGHT_OPTIONS, WEIGHTS
from midflight.config.loss import (
    CorrectionSection,
    CriticSection,
    Loss,
    ObjectiveSection,
    formula_of,
    loss_of,
    weight_bounds,
    weight_of,
)
from midflight.config.seats import cluster_contradictions, server_contradictions
from midflight.config.sections import Config, EngineSection
from midflight.config.sources import source_contradictions
from midflight.entries import ENTRY
from midflight.errors import nearest
from midflight.types import StalePolicy

# --- The loss -------------------------------------------------------------------------------------


def component_weights(config: Config) -> Mapping[str, float] | None:
    """Those that are not 1, by name, where components of the reward are compared by themselves."""
    if config.objective.normalise == "reward":
        return None
    return {
        reward.label: reward.weight for reward in config.environment.rewards if reward.weight != 1.0
    }


def _whole_rollouts(config: Config) -> Iterator[str]:
    """What takes one advantage for a whole rollout, so that answers cannot have rewards of their
    own.
    """
    if config.objective.normalise == "component":
        yield 'objective.normalise = "component"'
    if formula_of(config.objective, config.correction).is_per_rollout:
        yield f'objective.kind = "{config.objective.kind}"'
    if config.correction.opsm is not None:
        yield f"correction.opsm = {config.correction.opsm:g}"


def takes_whole_rollouts(config: Config) -> str:
    return next(_whole_rollouts(config), "")


# --- As text --------------------------------------------------------------------------------------


def effective_loss(config: Config) -> tuple[str, ...]:
    """Per-token loss, ratios, masks, advantage and reduction, one line each; µ is the behaviour
    policy, π the current one, sg stops the gradient.
    """
    return tuple(_lines(config))


def _lines(config: Config) -> Iterator[str]:
    o = config.objective
    loss = loss_of(config.objective, config.correction)
    yield _token(config, loss)
    yield from _ratios(config, loss)
    for name, bounds in loss.masks.items():
        yield f"masked unless {MASKS[name].text.format(**bounds)}"
    if o.kl_coefficient:
        yield (
            f"loss += {o.kl_coefficient:g} {formulas.DIVERGENCES[o.kl].text},  π_ref = the "
            "weights that the run began with"
        )
    if o.behaviour_coefficient:
        yield f"loss += {o.behaviour_coefficient:g} log²(π / µ)"
    if o.entropy_coefficient:
        yield f"loss -= {o.entropy_coefficient:g} entropy of π"
    yield from _advantage(config)
    if o.normalise == "component":
        yield (
            "compared for each component of the reward by itself, summed by weight, then (A - "
            "mean) / std over the batch (GDPO)"
        )
    yield (
        "reduction: "
        f"{formulas.REDUCTIONS[loss.reduction].text.format(length=config.environment.max_tokens)}"
    )
    if o.overlong_buffer:
        yield (
            f"reward -= {o.overlong_penalty:g} * (1 - room / {o.overlong_buffer}) where an "
            f"answer left room for less than {o.overlong_buffer} tokens"
        )
    if o.mask_truncated:
        yield "masked where an answer of the rollout was cut short by its limit"


def _token(config: Config, loss: Loss) -> str:
    numbers = {
        **loss.options,
        "low": 1 - loss.options.get("clip_low", 0),
        "high": 1 + loss.options.get("clip_high", 0),
    }
    token = "".join(
        [
            loss.formula.text,
            *(text for name, text in loss.formula.at_will.items() if name in loss.options),
        ]
    ).format(**numbers)
    factors = (
        [f"sg[{WEIGHTS[loss.weight].text.format(**loss.bounds)}]"] if loss.weight != "off" else []
    )
    if config.correction.self_normalised:
        factors = [f"{factors[0]} / mean over the batch"]
    if config.correction.age_decay < 1:
        factors.append(f"{config.correction.age_decay:g}^age")
    return "loss = " + (" * ".join([*factors, f"({token})"]) if factors else token)


def _ratios(config: Config, loss: Loss) -> Iterator[str]:
    updates = config.trainer.updates_per_step
    if loss.is_bypass:
        yield "R = π / µ: the ratio to the behaviour policy, no further weight"
    elif config.objective.proximal == "interpolated":
        yield (
            "ρ = π_prox / µ,  r = π / π_prox,  log π_prox between log µ and log sg[π] by the "
            "versions (A-3PO)"
        )
    elif updates == 1:
        yield "ρ = sg[π] / µ,  r = π / sg[π]: one update per step, so r is 1 and no clip acts"
    else:
        yield "ρ = π_prox / µ,  r = π / π_prox,  π_prox from the start of the step"


def _advantage(config: Config) -> Iterator[str]:
    d = config.distillation
    c = config.critic
    if d.teacher is None or d.rewards:
        yield formulas.ADVANTAGES[config.objective.advantage].text.format(
            discount=c.discount, trace=c.discount * c.trace_decay
        )
    if config.objective.advantage == "gae":
        yield (
            f"critic: loss = max((V - G)², (clip(V, V_start ± {c.clip:g}) - G)²) / 2,  G = Â + "
            "V_start, mean over the batch's tokens"
        )
    if d.teacher is not None:
        yield f"A {'+=' if d.rewards else '='} {d.weight:g} log(π_teacher / µ), token by token"


# --- Checks ---------------------------------------------------------------------------------------


_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_URL = re.compile(r"https?://[^\s/?#@]+/?")


def contradictions(config: Config) -> tuple[str, ...]:
    """One sentence for each pair of options that can't both hold, with the remedy. Empty for a
    sound configuration.
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
    if r.buffer_bytes is not None and r.buffer_bytes < (batch := batch_bytes(config)):
        yield (
            f"rollout.buffer_bytes ({r.buffer_bytes}) is less than the {batch} bytes that the "
            "rollouts of one step can take (each up to model.max_context = "
            f"{config.model.max_context} tokens); raise it, or lower model.max_context"
        )
    if r.max_in_flight is not None and r.max_in_flight < r.group_size:
        yield (
            f"rollout.max_in_flight ({r.max_in_flight}) is less than rollout.group_size "
            f"({r.group_size}), so no group could run whole; raise max_in_flight or lower "
            "group_size"
        )
    for option, number in (
        ("rollout", r.max_in_flight),
        ("evaluation", config.evaluation.max_in_flight),
    ):
        if number is None or number <= config.gateway.max_sessions:
            continue
        yield (
            f"{option}.max_in_flight ({number}) is more than gateway.max_sessions "
            f"({config.gateway.max_sessions}), beyond which rollouts are refused; lower it, or "
            "raise gateway.max_sessions"
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
            f"model.hidden_size / model.num_heads ({m.hidden_size // m.num_heads}) must be "
            "even, "
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
    if t.updates_per_step > (groups := config.rollout.groups_per_step):
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


def loss_contradictions(
    objective: ObjectiveSection, correction: CorrectionSection
) -> Iterator[str]:
    """One sentence for each pair of options that cannot both hold: above all what would weigh by
    one ratio twice.
    """
    formula = formula_of(objective, correction)
    weight = correction.weight
    if formula.form == "bypass" and weight not in (None, "off"):
        yield (
            f'objective.kind = "{objective.kind}" with correction.weight = "{weight}" would count '
            "the ratio to the behaviour policy twice; "
            "remove correction.weight, or choose an objective that takes a weight, such as "
            "decoupled_ppo"
        )
    for name in OBJECTIVE_OPTIONS:
        if getattr(objective, name) is not None and name not in formula.all_options:
            takers = ", ".join(
                kind for kind, other in OBJECTIVES.items() if name in other.all_options
            )
            yield (
                f"objective.{name} ({getattr(objective, name):g}) does nothing with "
                f'objective.kind = "{objective.kind}"; remove it, or choose one of {takers}'
            )
    yield from _weight_contradictions(objective, correction)
    if (demand := formula.demand) is not None and (
        given := getattr(objective, demand.option)
    ) not in (None, demand.value):
        yield (
            f'objective.kind = "{objective.kind}" {demand.why}, so objective.{demand.option} = '
            f'"{given}" cannot be; '
            f'set objective.{demand.option} = "{demand.value}"'
        )
    yield from _token_contradictions(objective, correction)
    if objective.normalise == "component" and objective.advantage != "grpo":
        yield (
            'objective.normalise = "component" compares each component as GRPO does, and '
            f'objective.advantage is "{objective.advantage}"; '
            'set objective.advantage = "grpo", or objective.normalise = "reward"'
        )
    yield from _added_contradictions(objective)
    if objective.proximal == "interpolated" and formula.form == "bypass":
        yield (
            'objective.proximal = "interpolated" does nothing with objective.kind = '
            f'"{objective.kind}", which has no proximal policy; remove it'
        )


def _added_contradictions(objective: ObjectiveSection) -> Iterator[str]:
    if objective.behaviour_coefficient and objective.kind == "mirror_descent":
        yield (
            f"objective.behaviour_coefficient ({objective.behaviour_coefficient:g}) adds what "
            "mirror_descent has already, log² R; remove it, and set objective.tau to twice of "
            "both together"
        )
    low = objective.cov_low
    high = objective.cov_high
    if low is not None and high is not None and low >= high:
        yield f"objective.cov_low ({low:g}) must be less than objective.cov_high ({high:g})"
    if objective.advantage == "maxrl" and objective.overlong_buffer:
        yield (
            f"objective.overlong_buffer ({objective.overlong_buffer}) may make a reward negative, "
            'and objective.advantage = "maxrl" divides by their '
            "mean; remove it (objective.mask_truncated leaves such rollouts out), or choose "
            "another advantage"
        )


def _token_contradictions(
    objective: ObjectiveSection, correction: CorrectionSection
) -> Iterator[str]:
    if objective.advantage != "gae":
        return
    if formula_of(objective, correction).is_per_rollout:
        yield (
            f'objective.kind = "{objective.kind}" takes one advantage for a whole rollout, and '
            'objective.advantage = "gae" gives one to each token; change one'
        )
    if correction.opsm is not None:
        yield (
            f"correction.opsm ({correction.opsm:g}) goes by the sign of a whole rollout's "
            'advantage, and objective.advantage = "gae" gives one to each token; remove it'
        )


def _weight_contradictions(
    objective: ObjectiveSection, correction: CorrectionSection
) -> Iterator[str]:
    weight = weight_of(objective, correction)
    for name in WEIGHT_OPTIONS:
        if getattr(correction, name) is not None and name not in WEIGHTS[weight].options:
            yield (
                f"correction.{name} ({getattr(correction, name):g}) does nothing with the "
                "weight "
                f'"{weight}"; remove it, or set correction.weight'
            )
    if correction.self_normalised and weight == "off":
        yield (
            "correction.self_normalised does nothing without a weight; remove it, or set "
            "correction.weight"
        )
    bounds = weight_bounds(weight, correction)
    for name, (below, above) in {
        "low": (bounds.get("low"), bounds.get("high")),
        "geometric_low": (correction.geometric_low, correction.geometric_high),
        "product_low": (correction.product_low, correction.product_high),
        "veto_low": (correction.veto_low, correction.veto_high),
    }.items():
        if below is not None and above is not None and below >= above:
            yield f"correction.{name} ({below:g}) must be less than its upper bound ({above:g})"


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
    if (
        not d.rewards
        and d.teacher is not None
        and not config.warm_start.is_made
        and _is_start(config, d.teacher)
    ):
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
            "and distillation.teacher gives one to each token; "
            f"choose another objective, or remove the teacher"
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


def _is_start(config: Config, folder: Path) -> bool:
    return config.model.path is not None and Path(config.model.path).resolve() == folder.resolve()


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
    if e.kind != "embedded" and (served := served_dtype(config)) == "float64":
        yield (
            f'engine.kind = "{e.kind}" cannot serve {served}; set engine.dtype to "float32", or '
            'engine.kind to "embedded"'
        )
    if e.deterministic and (why := _not_deterministic(e)):
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
    """Why an engine cannot be made to compute each answer as if it were alone; empty where it
    can.
    """
    if engine.kind == "embedded":
        return (
            "the embedded engine samples by seed and position already, and has no kernels "
            "whose "
            "rounding is the same in every batch"
        )
    if engine.kind == "vllm" and engine.urls:
        return (
            "a vLLM server that runs already does not say whether it was started with "
            "VLLM_BATCH_INVARIANT=1"
        )
    if engine.device == "cpu" and not engine.urls:
        return (
            f"{'vLLM' if engine.kind == 'vllm' else 'SGLang'} has such kernels for GPUs alone, "
            "and engine.device is cpu"
        )
    return ""


def _places(config: Config) -> Iterator[str]:
    if config.environment.sampling.truncates_the_policy and config.engine.kind != "embedded":
        yield (
            "environment.top_p, top_k and min_p need to know what was kept, which engine.kind = "
            f'"{config.engine.kind}" does not say; remove them'
        )
    if config.environment.sampling.truncates_the_policy and not trains_truncated(
        config, trainer_is_ours=True
    ):
        why = (
            "correction.sampling_masks = false"
            if config.distillation.teacher is None
            else "distillation.teacher"
        )
        yield (
            f"environment.top_p, top_k and min_p leave nothing to train with {why}, which keeps "
            "such turns out of the loss; remove one of both"
        )
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


TRACKERS = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "otel": "opentelemetry.exporter.otlp.proto.http",
}
"""The package that each of the known ones needs, which the extra of the same name installs."""


def _observe(config: Config) -> Iterator[str]:
    names = config.observe.trackers
    for name in names:
        if name not in TRACKERS and not ENTRY.fullmatch(name):
            what = f"there are {', '.join(TRACKERS)}, and `module:Class` of your own"
            yield (
                f"observe.trackers names {name!r}, which is no tracker: "
                f"{what}.{nearest(name, TRACKERS)}"
            )
        elif (package := TRACKERS.get(name)) and not _is_installed(package):
            yield (
                f"observe.trackers names {name!r}, and the package {package} is not installed; "
                f"pip install 'midflight[{name}]'"
            )
    if len(set(names)) < len(names):
        yield (
            f"observe.trackers names one twice ({', '.join(names)}), and would tell it "
            "everything twice; name each once"
        )


def _is_installed(package: str) -> bool:
    """A folder that a tracker wrote here would be found too, as a package without a file."""
    try:
        return (found := find_spec(package)) is not None and found.origin is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def notes(config: Config) -> tuple[str, ...]:
    """What is allowed but may surprise: shown by `--dry-run` and at the start of a run."""
    return tuple(_notes(config))


def _notes(config: Config) -> Iterator[str]:
    r = config.rollout
    if r.max_staleness == 0:
        yield (
            "rollout.max_staleness = 0 is the synchronous loop: exactly one batch of groups is "
            "admitted per version, nothing is prefetched, engines wait while the trainer steps, "
            "and the pause mode does not matter."
        )
    if (
        r.group_size == 1
        and config.distillation.teacher is None
        and config.objective.advantage != "gae"
    ):
        yield "rollout.group_size = 1 has nothing to compare with: every advantage is 0."
    if r.stale_policy in (StalePolicy.MASK, StalePolicy.REQUEUE):
        yield (
            f"rollout.stale_policy = {r.stale_policy.value} is biased: long answers lose credit "
            "or are drawn less often."
        )
    if r.stale_policy is StalePolicy.DROP:
        yield (
            "rollout.stale_policy = drop shortens what is trained: slow, long answers are "
            "dropped most."
        )
    if (
        config.correction.weight == "off"
        and formula_of(config.objective, config.correction).form == "decoupled"
        and r.max_staleness > 0
    ):
        yield (
            'correction.weight = "off" trains tokens of older policies as if they were fresh: '
            "nothing corrects for their age."
        )
    if in_flight(config) < batch_rollouts(r):
        yield (
            f"{in_flight(config)} rollouts run at once, less than one batch "
            f"({batch_rollouts(r)} "
            "rollouts): a step waits for several waves."
        )
    if r.max_in_flight is not None and r.max_in_flight > engine_slots(config):
        yield (
            f"{r.max_in_flight} rollouts in flight share {engine_slots(config)} engine slots: the "
            "others wait inside the engine, or use their time in tools."
        )
    if config.model.dtype == "bfloat16":
        yield (
            "model.dtype = bfloat16 keeps weights and moments in bfloat16: steps of "
            f"{config.trainer.learning_rate:g} leave weights above "
            f"{_least_unmoved(config.trainer.learning_rate):.2g} as they are. To learn, keep "
            'float32, and serve by engine.dtype = "bfloat16"; '
            'on GPUs, and CPUs with AMX, also compute by trainer.compute_dtype = "bfloat16".'
        )
    if (served := served_dtype(config)) != config.model.dtype:
        yield (
            f"engines serve in {served} what is trained in {config.model.dtype}: "
            "log-probabilities differ by rounding, which the loss corrects for."
        )
    yield from context_notes(config)
    if not any(source.has_heldout for source in config.environment.sources):
        yield (
            "no source holds tasks out (heldout), so nothing is evaluated, before, during or "
            "after training."
        )
    if not config.warm_start.is_made and config.model.path is None:
        yield (
            "warm_start.target_accuracy is not set and the model is made with random weights: "
            "reward may stay at 0."
        )


def _least_unmoved(step: float) -> float:
    """The power of two above which no number of bfloat16 is changed by adding a step, because half
    the distance to the next one is more.

    From 2**k to 2**(k + 1) they lie 2**(k - 7) apart.
    """
    return 2.0 ** (math.floor(math.log2(step * 2**8)) + 1)
