"""The tokenizer of a model folder, checked against the model. This module imports no torch."""

from pathlib import Path

from midflight.errors import ConfigError
from midflight.models.sizes import sizes_of
from midflight.text.tokenizer import Tokenizer


def check_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises `ConfigError` if it has more ids than the model has
    rows: such an id would have no embedding.
    """
    tokenizer = Tokenizer.load(folder)
    rows = sizes_of(folder).vocab_size
    if tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer in {str(folder)!r} has ids up to {tokenizer.vocab_size - 1}, and the "
            f"model has {rows} rows of embeddings; give the model its own tokenizer, or resize its "
            "embeddings."
        )
    return tokenizer
