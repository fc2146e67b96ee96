from __future__ import annotations

import pytest
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .fixtures import exact_norm


@pytest.fixture(autouse=True)
def norms_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3RMSNorm, "forward", exact_norm)
