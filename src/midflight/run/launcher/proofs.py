"""What trainer, embedded engine and export make of a model folder, found before anything is
started; for `midflight check-model`, the dry run, and docs/models.md.

    python -m midflight.run.launcher.proofs DIR MAX_CONTEXT      as JSON
"""

import copy
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel

from midflight.engines.embedded.probe import engine_verdict
from midflight.errors import MidflightError, ModelNotFound
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
    """Of the trainer, the embedded engine and the export. Reads the weights of a small model only.
    `ModelNotFound` where it is no model, `ConfigError` where it does not even compute by itself."""
    load.check_folder(folder)
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = load.auto_class(config).from_config(
                config, dtype=torch.float32
            )
    except Exception as error:  # an architecture fails as it likes to
        raise ModelNotFound(
            f"making the model in {str(folder)!r}: transformers {version('transformers')} raises "
            f"{described(error)}; correct its config.json, or install a version of transformers "
            "that makes it."
        ) from error
    if is_small(model):
        model = load.load_model(folder, dtype="float32")
    return proofs(model, max_context=max_context)


def proofs(model: PreTrainedModel, *, max_context: int = MAX_CONTEXT) -> list[Proof]:
    """The model stays as it is; of a large one, which may be without memory, small copies of its
    configuration are tried.
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
    """A folder that is written, read and written again has the same names and numbers, and computes
    the same.
    """
    row = rows_to_try(model)[0]
    with tempfile.TemporaryDirectory(prefix="midflight-") as place, torch.inference_mode():
        first = Path(place) / "first"
        second = Path(place) / "second"
        try:
            model.save_pretrained(first)
            loaded = load.load_model(first, dtype="float32")
            load.save_model(loaded, second)
            if lost := _names(first) ^ _names(second):
                raise RuntimeError(f"tensor {min(lost)!r} gets another name")
            with eagerly(model), eagerly(loaded):
                expected, found = (
                    own_logits(each, row).log_softmax(-1) for each in (model, loaded)
                )
        except Exception as error:  # an architecture fails as it likes to
            return Proof(
                "export",
                Way.REFUSED,
                reason=(
                    f"{model.config.model_type} is not written as it is read: {described(error)}."
                ),
            )
    error = float((expected - found).abs().max())
    if not error <= TOLERANCE:
        return Proof(
            "export",
            Way.REFUSED,
            error,
            reason=(
                f"{model.config.model_type} does not compute the same after it was written and "
                "read."
            ),
        )
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
    nats = proof.logprob_error
    share = proof.gradient_error
    errors = [
        *([] if nats is None else [f"{nats:.1e} nats"]),
        *([] if share is None else [f"{share:.1e} of the gradient"]),
    ]
    off = f" (off by at most {', '.join(errors)})" if errors and proof.is_right else ""
    return f"{proof.part}: {_SAID[proof.way]}{off}{f'. {proof.reason}' if proof.reason else ''}"


def main() -> None:
    """Writes whether each part is right, and a line about it; or what is wrong with the folder."""
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
