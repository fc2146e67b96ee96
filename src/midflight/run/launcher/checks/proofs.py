"""Checks, before anything is started, that trainer, embedded engine and export compute the same as
the model. `midflight check-model`, the dry run and docs/models.md show the proofs.

    python -m midflight.run.launcher.checks.proofs DIR MAX_CONTEXT      writes them as JSON
"""

import copy
import sys
import tempfile
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from midflight.engines.embedded.probe import engine_verdict
from midflight.errors import MidflightError
from midflight.models import load
from midflight.models.proof import (
    TOLERANCE,
    Proof,
    Way,
    described,
    eagerly,
    is_small,
    own_logits,
    rows_to_try,
    stand_in,
)
from midflight.run.launcher.trial import trying
from midflight.trainer.model.probe import prove

MAX_CONTEXT = 4096
BATCH_TOKENS = 256


def proofs_of(folder: Path, *, max_context: int = MAX_CONTEXT) -> list[Proof]:
    """The proofs for trainer, embedded engine and export. Reads the weights of a small model only.
    Raises `ModelNotFound` if the folder is not a model, and `ConfigError` if the model does not
    even compute by itself.
    """
    model = load.outline(folder)
    if is_small(model):
        model = load.load_model(folder, dtype="float32")
    return proofs(model, max_context=max_context)


def proofs(model: PreTrainedModel, *, max_context: int = MAX_CONTEXT) -> list[Proof]:
    """The proofs for a model, which stays as it is. In place of a large one, which may be without
    memory, a small one of its configuration is tried.
    """
    small = model if is_small(model) else stand_in(model, max_context=max_context)
    return [
        prove(model, max_context=max_context),
        engine_verdict(
            copy.deepcopy(small), max_context=max_context, max_batch_tokens=BATCH_TOKENS
        ),
        prove_export(small),
    ]


def prove_export(model: PreTrainedModel) -> Proof:
    """Proves that a folder that is written, read and written again has the same names and numbers,
    and computes the same.
    """
    row = rows_to_try(model)[0]
    with tempfile.TemporaryDirectory(prefix="midflight-") as place, torch.inference_mode():
        first = Path(place) / "first"
        second = Path(place) / "second"
        try:
            model.save_pretrained(first)
            loaded = load.load_model(first, dtype="float32")
            load.save_model(loaded, second)
            lost = _names(first) ^ _names(second)
            if lost:
                raise RuntimeError(f"tensor {min(lost)!r} gets another name")
            with eagerly(model), eagerly(loaded):
                expected = own_logits(model, row).log_softmax(-1)
                found = own_logits(loaded, row).log_softmax(-1)
        except Exception as error:  # an architecture fails as it likes to
            reason = f"{model.config.model_type} is not written as it is read: {described(error)}."
            return Proof("export", Way.REFUSED, reason=reason)
    error = float((expected - found).abs().max())
    if not error <= TOLERANCE:
        reason = (
            f"{model.config.model_type} does not compute the same after it was written and read."
        )
        return Proof("export", Way.REFUSED, error, reason=reason)
    return Proof("export", Way.PACKED, error)


def _names(folder: Path) -> set[str]:
    found = set[str]()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= set(file.keys())
    return found


_SAID = {
    Way.PACKED: "right",
    Way.FALLBACK: "right, slower",
    Way.WHOLE: "right, slowest",
    Way.REFUSED: "refused",
}


def line(proof: Proof) -> str:
    errors: list[str] = []
    if proof.logprob_error is not None:
        errors.append(f"{proof.logprob_error:.1e} nats")
    if proof.gradient_error is not None:
        errors.append(f"{proof.gradient_error:.1e} of the gradient")
    off = f" (off by at most {', '.join(errors)})" if errors and proof.is_right else ""
    reason = f". {proof.reason}" if proof.reason else ""
    return f"{proof.part}: {_SAID[proof.way]}{off}{reason}"


def main() -> None:
    """Writes for each part whether it is right, with a line about it. If the folder cannot be used,
    it writes the error.
    """
    with trying() as trial:
        try:
            found = [
                (proof.is_right, line(proof))
                for proof in proofs_of(Path(sys.argv[1]), max_context=int(sys.argv[2]))
            ]
        except MidflightError as error:
            found = str(error)
        trial.answer(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
