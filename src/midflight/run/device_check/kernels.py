"""Trials of the kernels: what trainer and engine compute on the device, beside the model's own plain
forward there and on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from transformers import PreTrainedModel

from midflight.engines.embedded.probe import engine_verdict
from midflight.errors import ConfigError
from midflight.models.proof import Proof, own_logprobs, rows_to_try
from midflight.run.device_check.bench import (
    SMALL,
    TOLERANCE,
    Bench,
    BenchSize,
    Found,
    Wrong,
    batch,
    most,
    not_tried,
    plain_logprobs,
    policy_trainer,
    requests,
    tried,
    within,
)
from midflight.run.device_check.report import DeviceTrial
from midflight.trainer.model.probe import prove_itself

CPU = torch.device("cpu")
ON_CPU = 'set trainer.device = "cpu"'
OTHER_ENGINE = 'set engine.device = "cpu", or engine.kind to "vllm" or "sglang"'
BFLOAT16_NATS = 0.1
"""The mean difference in nats between log-probabilities in bfloat16 and in float32 above which
something is wrong. Rounding gives about a hundredth.
"""
SAME_STEP = 1e-3
"""The share of a step by which the weights of two ways to make it may differ."""


def trainer_kernels(bench: Bench) -> Iterator[DeviceTrial]:
    """Yields the trials of the trainer's forward and backward."""
    yield tried(
        "the model's own forward, beside that on the CPU",
        lambda: _beside_the_cpu(bench),
        remedy=ON_CPU,
    )
    for size in bench.sizes:
        yield tried(
            f"packed rows and their gradient in float32, beside the model's own ({size.name})",
            lambda size=size: _proven(prove_itself(bench.model(size), max_context=size.context)),
            remedy=ON_CPU,
        )
    yield tried(
        "a step in bfloat16 above float32",
        lambda: _step_in_bfloat16(bench),
        remedy='set trainer.compute_dtype = "auto"',
    )
    yield tried(
        "a step that computes activations again",
        lambda: same_step(bench, activation_checkpointing=True),
        remedy="set trainer.activation_checkpointing = false",
    )
    what = "a step with compiled layers"
    if bench.is_cuda:
        yield tried(
            what,
            lambda: same_step(bench, compiled=True),
            remedy="set trainer.compile = false",
        )
    else:
        yield not_tried(what, f"compiling for {bench.device} takes minutes")
    if bench.why_not_real:
        yield not_tried("the trainer in real size", bench.why_not_real)


def engine_kernels(bench: Bench) -> Iterator[DeviceTrial]:
    """Yields the trials of the embedded engine's forward and sampling."""
    yield tried(
        "prefill, decode, kept prefixes and scores, beside the model's own forward",
        lambda: _engine_proven(bench),
        remedy=OTHER_ENGINE,
    )
    yield tried(
        "the same tokens as on the CPU, for the same seeds",
        lambda: _same_tokens(bench),
        remedy=OTHER_ENGINE,
    )
    for size in bench.sizes:
        yield tried(
            f"the log-probability of each token, computed again in float32 ({size.name})",
            lambda size=size: _said_and_computed(bench, size),
            remedy=OTHER_ENGINE,
        )
    yield tried(
        "the log-probabilities of an engine in bfloat16, beside a trainer in float32",
        lambda: _mismatch(bench, SMALL),
        remedy='set engine.dtype = "float32"',
    )
    if bench.why_not_real:
        yield not_tried("the embedded engine in real size", bench.why_not_real)


# --- Trainer --------------------------------------------------------------------------------------


@torch.no_grad()
def _beside_the_cpu(bench: Bench) -> str:
    there = bench.model(SMALL)
    here = bench.model(SMALL, device=CPU)
    worst = 0.0
    for row in rows_to_try(here):
        one, other = (
            own_logprobs(model, row[:-1], row[1:], temperature=1.0).cpu().double().numpy()
            for model in (here, there)
        )
        worst = max(worst, most(one, other))
    return within(worst, TOLERANCE, "nats apart at most")


def _proven(proof: Proof) -> str:
    if not proof.is_right:
        raise Wrong(proof.reason)
    said = f"{proof.layout}, {proof.logprob_error or 0.0:.2g} nats and "
    said += f"{proof.gradient_error or 0.0:.2g} of a gradient apart at most"
    return f"{said} ({proof.reason})" if proof.reason else said


def _step_in_bfloat16(bench: Bench) -> str:
    losses = dict[str, float]()
    for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
        trainer = policy_trainer(bench.model(SMALL), SMALL, compute_dtype=dtype)
        report = trainer.step(batch(SMALL, 0))
        if not np.isfinite(report.loss) or report.skipped is not None:
            raise Wrong(f"the loss in {name} is {report.loss}, and the step was skipped")
        losses[name] = report.loss
    apart = abs(losses["bfloat16"] - losses["float32"])
    return within(apart, BFLOAT16_NATS, "apart from the loss in float32")


def same_step(
    bench: Bench, *, activation_checkpointing: bool = False, compiled: bool = False
) -> str:
    """The share of the step's length by which it differs from a step without the options. Raises
    `Wrong` if that is more than rounding.
    """
    plain = stepped(bench)
    other = stepped(bench, activation_checkpointing=activation_checkpointing, compiled=compiled)
    before = weights_of(bench.model(SMALL))
    share = float((plain - other).norm() / (plain - before).norm())
    return within(share, SAME_STEP, "of the step apart")


def stepped(
    bench: Bench, *, activation_checkpointing: bool = False, compiled: bool = False
) -> torch.Tensor:
    """The weights after a step from the small model."""
    model = bench.model(SMALL)
    trainer = policy_trainer(
        model, SMALL, activation_checkpointing=activation_checkpointing, compiled=compiled
    )
    trainer.step(batch(SMALL, 0))
    return weights_of(model)


def weights_of(model: PreTrainedModel) -> torch.Tensor:
    """All parameters in one row, in double precision on the CPU."""
    flat = [parameter.detach().cpu().double().flatten() for parameter in model.parameters()]
    return torch.cat(flat)


# --- Engine ---------------------------------------------------------------------------------------


def _engine_proven(bench: Bench) -> str:
    model = bench.model(SMALL)
    try:
        proof = engine_verdict(model, max_context=SMALL.context, max_batch_tokens=SMALL.micro_batch)
    except ConfigError as error:
        raise Wrong(str(error)) from error
    if not proof.is_right:
        raise Wrong(proof.reason)
    return f"{proof.way.value}, {proof.logprob_error or 0.0:.2g} nats apart at most"


def _same_tokens(bench: Bench) -> str:
    asked = requests(SMALL, max(SMALL.running))
    there = bench.engine(bench.model(SMALL), SMALL).generate_all(asked)
    here = bench.engine(bench.model(SMALL, device=CPU), SMALL).generate_all(asked)
    different = sum(a.token_ids != b.token_ids for a, b in zip(here, there, strict=True))
    if different:
        raise Wrong(f"{different} of {len(asked)} answers have other tokens than on the CPU")
    return f"{len(asked)} answers of {SMALL.answer} tokens"


def _said_and_computed(bench: Bench, size: BenchSize) -> str:
    model = bench.model(size)
    engine = bench.engine(model, size)
    asked = requests(size, 4, answer=SMALL.answer)
    worst = 0.0
    for request, answer in zip(asked, engine.generate_all(asked), strict=True):
        expected = plain_logprobs(model, request.input_ids, answer.token_ids)
        worst = max(worst, most(answer.logprobs, expected))
    return within(worst, TOLERANCE, "nats apart at most")


def _mismatch(bench: Bench, size: BenchSize) -> Found:
    served = bench.model(size, dtype="bfloat16")
    trained = bench.model(size)
    with torch.no_grad():  # both have the same weights, those that are served
        for one, other in zip(trained.parameters(), served.parameters(), strict=True):
            one.copy_(other)
    asked = requests(size, 4)
    differences: list[np.ndarray] = []
    answers = bench.engine(served, size).generate_all(asked)
    for request, answer in zip(asked, answers, strict=True):
        expected = plain_logprobs(trained, request.input_ids, answer.token_ids)
        differences.append(np.abs(np.array(answer.logprobs) - expected))
    found = np.concatenate(differences)
    mean = float(found.mean())
    within(mean, BFLOAT16_NATS, "nats apart in the mean")
    return Found(f"{mean:.2g} nats apart in the mean, {found.max():.2g} at most")
