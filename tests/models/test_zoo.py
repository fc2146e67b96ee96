"""The zoo of tiny models: many architectures, each made at once, each the same whenever it is made."""

from __future__ import annotations

import pytest
import torch

from .zoo import SIX_HYBRIDS, ZOO, tiny, tiny_config


def test_the_zoo_has_at_least_170_architectures() -> None:
    assert len(ZOO) >= 170 and set(SIX_HYBRIDS) <= set(ZOO)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_tiny_model_depends_on_its_name_and_the_vocabulary_only(name: str) -> None:
    torch.manual_seed(1)
    first = tiny(name, vocab_size=270)
    torch.manual_seed(2)
    again = tiny(name, vocab_size=270)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert tiny_config(name, 270).get_text_config().vocab_size == 270
