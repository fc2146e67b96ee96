"""Whether a teacher can score what the student samples: token for token, so that both must mean the same by an id."""

from __future__ import annotations

from pathlib import Path

from midflight.config.memory import model_sizes
from midflight.config.sections import Config
from midflight.errors import ConfigError
from midflight.models.sizes import sizes_of
from midflight.text.byte_tokenizer import byte_tokenizer
from midflight.text.tokenizer import Tokenizer


def check_teacher(config: Config) -> None:
    """`ConfigError` when the teacher's folder has no model, another vocabulary or another tokenizer; nothing without a teacher."""
    teacher = config.distillation.teacher
    if teacher is None:
        return
    if not teacher.is_dir():
        raise ConfigError(f"distillation.teacher is {str(teacher)!r}, and there is no such folder; give that of a Hugging Face model.")
    theirs, ours = sizes_of(teacher).vocab_size, model_sizes(config.model).vocab_size
    if theirs < ours:  # more are padding: the tokenizers are compared below
        raise ConfigError(
            f"distillation.teacher has a vocabulary of {theirs} tokens, fewer than the student's {ours}; choose a teacher of the student's family."
        )
    their_ids, our_ids = _ids(teacher), _ids(config.model.path)
    if different := sorted(their_ids.items() ^ our_ids.items(), key=lambda item: item[1]):
        token, number = different[0]
        raise ConfigError(
            f"distillation.teacher has another tokenizer: only one of teacher and student has {token!r} as token {number}; "
            "choose a teacher of the student's family."
        )


def _ids(folder: Path | None) -> dict[str, int]:
    """Id by token, of a model folder or of made models."""
    backend = byte_tokenizer() if folder is None else Tokenizer.load(folder).backend
    return backend.get_vocab(with_added_tokens=True)
