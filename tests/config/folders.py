"""Folders that hold the configuration of a model and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

SIZES = {
    "vocab_size": 262,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}
"""As `config.json` of a Llama has them."""


def folder_of_model(folder: Path, **fields: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SIZES, **fields}))
    return folder
