"""A loss of the user's own, named as `module:function`: found, and tried on a few made-up tokens
before anything is started.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from midflight.config.formulas import OBJECTIVE_OPTIONS, OBJECTIVES
from midflight.config.sections import Config
from midflight.entries import load_entry
from midflight.errors import ConfigError, nearest
from midflight.trainer.objective import PER_TOKEN, WHOLE, Known, Objective, call, parameters

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def objective_of(config: Config) -> Objective:
    """What a configuration asks for. `ConfigError` if the loss it names is of the user's own and
    cannot be trained with.
    """
    section = config.objective
    kind = config.objective.kind
    if kind in OBJECTIVES:
        return Objective.of(
            section, config.correction, constant_length=config.environment.max_tokens
        )
    found = load_entry(kind, option="objective.kind", such_as="examples.own_loss:spo")
    if not callable(found):
        raise ConfigError(
            f"objective.kind is {kind!r}, which is {type(found).__name__} {found!r}; name a "
            "function."
        )
    function = cast(Callable[..., Tensor], found)
    objective = Objective.of(
        section, config.correction, constant_length=config.environment.max_tokens, own=function
    )
    _check_parameters(kind, objective)
    _try_out(kind, objective)
    return objective


def described(config: Config) -> str:
    """The user's loss in a sentence, after it was tried."""
    objective = objective_of(config)
    options = objective.loss.options
    looked_at = parameters(objective.function)
    taken = ", ".join(
        f"{name} = {options[name]:g}" if name in options else name for name in looked_at
    )
    first = (inspect.getdoc(objective.function) or "no docstring").partition("\n")[0]
    return (
        f"{config.objective.kind}({taken}): {first} Tried on {len(_made_up().now)} tokens: one "
        "finite loss for each, with a gradient."
    )


def _check_parameters(kind: str, objective: Objective) -> None:
    """Each parameter must be something that a loss is given; each option that is set must be one of
    them.
    """
    known = (*PER_TOKEN, *WHOLE, *OBJECTIVE_OPTIONS)
    options = objective.loss.options
    taken = inspect.signature(objective.function).parameters
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
    makers = [inspect.signature(WHOLE[name]).parameters for name in taken if name in WHOLE]
    needed = {
        name
        for of in (taken, *makers)
        for name in of
        if name in OBJECTIVE_OPTIONS and of[name].default is inspect.Parameter.empty
    }
    for name in sorted(needed - options.keys()):
        raise ConfigError(
            f"objective.kind is {kind!r}, which needs objective.{name}, and that is not set; set "
            "it, or give the parameter a default."
        )
    for name in sorted(
        options.keys() - taken.keys() - {name for maker in makers for name in maker}
    ):
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


def _made_up() -> Known:
    """Two rollouts of three tokens, of three versions; one went well and one badly."""
    behaviour = torch.tensor([-0.7, -1.6, -0.2, -2.3, -0.9, -1.2])
    proximal = behaviour + torch.tensor([0.1, -0.2, 0.0, 0.3, -0.1, 0.05])
    return Known(
        now=proximal + torch.tensor([0.05, 0.1, -0.02, -0.1, 0.2, 0.0]),
        proximal=proximal,
        behaviour=behaviour,
        advantage=torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5, -0.5]),
        age=torch.tensor([2, 1, 1, 0, 1, 0]),
        sequence=torch.tensor([0, 0, 0, 1, 1, 1]),
        num_sequences=2,
    )


def _try_out(kind: str, objective: Objective) -> None:
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
    gradient = (
        torch.autograd.grad(loss.sum(), policy, allow_unused=True)[0]
        if loss.requires_grad
        else None
    )
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
    parts = [
        _called(kind, objective, policy, known, part) for part in (slice(half), slice(half, None))
    ]
    if not torch.allclose(torch.cat(parts), loss):
        raise ConfigError(
            f"objective.kind is {kind!r}, which gave tokens another loss beside other tokens. A "
            "micro-batch holds any tokens of the batch: return what is a token's own, without "
            "sums, means or draws over the others."
        )


def _called(kind: str, objective: Objective, policy: Tensor, known: Known, part: slice) -> Tensor:
    """The loss of a part of the tokens, as a micro-batch has it."""
    where = torch.arange(len(policy))[part]
    own = replace(
        known,
        **{
            name: getattr(known, name)[where]
            for name in ("now", "proximal", "behaviour", "advantage", "age", "sequence")
        },
    )
    factors = objective.factors(known).at(where)
    try:
        found = cast(
            object, call(objective.function, objective.values(policy[where], own, factors))
        )
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
