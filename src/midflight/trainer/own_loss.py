"""The user's own loss, named as `module:function`. It is tried on a few made-up tokens before
anything is started.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from midflight.config.formulas import OBJECTIVE_OPTIONS, OBJECTIVES
from midflight.config.sections import Config
from midflight.entries import load_entry
from midflight.errors import ConfigError, nearest
from midflight.trainer.objective import PER_TOKEN, WHOLE, Objective, TokenValues, call, parameters

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def objective_of(config: Config) -> Objective:
    """The objective that a configuration asks for. Raises `ConfigError` if it names a loss of the
    user's own that cannot be trained with.
    """
    section = config.objective
    kind = section.kind
    length = config.environment.max_tokens
    if kind in OBJECTIVES:
        return Objective.of(section, config.correction, constant_length=length)
    found = load_entry(kind, option="objective.kind", such_as="examples.own_loss:spo")
    if not callable(found):
        raise ConfigError(
            f"objective.kind is {kind!r}, which is {type(found).__name__} {found!r}; name a "
            "function."
        )
    function = cast(Callable[..., Tensor], found)
    objective = Objective.of(section, config.correction, constant_length=length, own=function)
    _check_parameters(kind, objective)
    _try_out(kind, objective)
    return objective


def described(config: Config) -> str:
    """The user's loss in a sentence, after it was tried."""
    objective = objective_of(config)
    options = objective.loss.options
    taken: list[str] = []
    for name in parameters(objective.function):
        taken.append(f"{name} = {options[name]:g}" if name in options else name)
    first = (inspect.getdoc(objective.function) or "no docstring").partition("\n")[0]
    return (
        f"{config.objective.kind}({', '.join(taken)}): {first} Tried on {len(_made_up().now)} "
        "tokens: one finite loss for each, with a gradient."
    )


def _check_parameters(kind: str, objective: Objective) -> None:
    """Each parameter must be something that a loss is given; each option that is set must be one of
    them.
    """
    options = objective.loss.options
    taken = inspect.signature(objective.function).parameters
    _check_names(kind, taken)
    makers = [inspect.signature(WHOLE[name]).parameters for name in taken if name in WHOLE]
    needed = set[str]()
    used = set(taken)
    for parameters_of in (taken, *makers):
        used.update(parameters_of)
        needed.update(_without_default(parameters_of))
    for name in sorted(needed - options.keys()):
        raise ConfigError(
            f"objective.kind is {kind!r}, which needs objective.{name}, and that is not set; set "
            "it, or give the parameter a default."
        )
    for name in sorted(options.keys() - used):
        raise ConfigError(
            f"objective.{name} ({options[name]:g}) does nothing with objective.kind = {kind!r}, "
            f"which takes {', '.join(taken)}; remove it."
        )
    if not objective.loss.is_bypass and "behaviour" in taken:
        raise ConfigError(
            f"objective.kind is {kind!r}, which looks at the behaviour policy, so that "
            f"correction.weight = {objective.loss.weight!r} would count the ratio to it twice; "
            "remove correction.weight, or the parameter 'behaviour'."
        )


def _without_default(parameters_of: Mapping[str, inspect.Parameter]) -> Iterator[str]:
    """The options that must be set."""
    for name, parameter in parameters_of.items():
        if name in OBJECTIVE_OPTIONS and parameter.default is inspect.Parameter.empty:
            yield name


def _check_names(kind: str, taken: Mapping[str, inspect.Parameter]) -> None:
    known = (*PER_TOKEN, *WHOLE, *OBJECTIVE_OPTIONS)
    for name, parameter in taken.items():
        if parameter.kind not in _NAMED:
            raise ConfigError(
                f"objective.kind is {kind!r}, whose parameter {parameter} has no name to go by; "
                "name each thing it takes."
            )
        if name not in known:
            raise ConfigError(
                f"objective.kind is {kind!r}, whose parameter {name!r} is "
                f"unknown.{nearest(name, known)} A loss may take "
                f"{', '.join((*PER_TOKEN, *WHOLE))}, and options of [objective]: "
                f"{', '.join(OBJECTIVE_OPTIONS)}."
            )


def _made_up() -> TokenValues:
    """Two rollouts of three tokens, of three versions; one went well and one badly."""
    behaviour = torch.tensor([-0.7, -1.6, -0.2, -2.3, -0.9, -1.2])
    proximal = behaviour + torch.tensor([0.1, -0.2, 0.0, 0.3, -0.1, 0.05])
    return TokenValues(
        now=proximal + torch.tensor([0.05, 0.1, -0.02, -0.1, 0.2, 0.0]),
        proximal=proximal,
        behaviour=behaviour,
        advantage=torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5, -0.5]),
        age=torch.tensor([2, 1, 1, 0, 1, 0]),
        sequence=torch.tensor([0, 0, 0, 1, 1, 1]),
        num_sequences=2,
    )


def _try_out(kind: str, objective: Objective) -> None:
    """Raises `ConfigError` unless the loss gives each made-up token a finite loss of its own, with
    a gradient.
    """
    known = _made_up()
    policy = known.now.clone().requires_grad_()
    loss = _called(kind, objective, policy, known, slice(None))
    if loss.shape != policy.shape or not loss.is_floating_point():
        raise ConfigError(
            f"objective.kind is {kind!r}, which gave {loss.dtype} of shape {list(loss.shape)} for "
            f"{len(policy)} tokens; return one loss per token, without a mean or a sum: "
            "objective.reduction does that."
        )
    if not loss.isfinite().all():
        raise ConfigError(
            f"objective.kind is {kind!r}, whose losses were {loss.tolist()}; they must be finite: "
            "look at its exponents and divisions."
        )
    gradient: Tensor | None = None
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss.sum(), policy, allow_unused=True)
    if gradient is None or not gradient.any():
        raise ConfigError(
            f"objective.kind is {kind!r}, whose losses have no gradient; make them of policy, "
            "ratio or log_ratio, without .detach() or no_grad."
        )
    if not gradient.isfinite().all():
        raise ConfigError(
            f"objective.kind is {kind!r}, whose gradient was {gradient.tolist()}; it must be "
            "finite: look at roots and divisions."
        )
    half = len(policy) // 2
    first = _called(kind, objective, policy, known, slice(half))
    second = _called(kind, objective, policy, known, slice(half, None))
    if not torch.allclose(torch.cat([first, second]), loss):
        raise ConfigError(
            f"objective.kind is {kind!r}, which gave tokens another loss beside other tokens. A "
            "micro-batch holds any tokens of the batch: return what is a token's own, without "
            "sums, means or draws over the others."
        )


def _called(
    kind: str, objective: Objective, policy: Tensor, known: TokenValues, part: slice
) -> Tensor:
    """The loss of a part of the tokens, as a micro-batch has it."""
    where = torch.arange(len(policy))[part]
    own = replace(
        known,
        now=known.now[where],
        proximal=known.proximal[where],
        behaviour=known.behaviour[where],
        advantage=known.advantage[where],
        age=known.age[where],
        sequence=known.sequence[where],
    )
    factors = objective.factors(known).at(where)
    try:
        values = objective.values(policy[where], own, factors)
        found = cast(object, call(objective.function, values))
    except Exception as error:
        raise ConfigError(
            f"objective.kind is {kind!r}, which failed on {len(where)} made-up tokens with "
            f"{type(error).__name__}: {error}."
        ) from error
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"objective.kind is {kind!r}, which returned {type(found).__name__} {found!r}; return "
            "a tensor with one loss per token."
        )
    return found
