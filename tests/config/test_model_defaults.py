"""Options that follow from the model of a folder where they are unset."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.config.folders import folder_of_model

from midflight.cli.dry_run import print_report
from midflight.config import context, derived, load_config, model_defaults
from midflight.config.model_defaults import copying_rate, learning_rate, max_tokens
from midflight.run.launcher.checks.check import Findings

LARGE = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
"""134 million parameters with these, three heads of keys, and tied embeddings."""


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return folder_of_model(tmp_path / "large", **LARGE, num_key_value_heads=3, tie_word_embeddings=True)


def test_steps_are_smaller_for_larger_models() -> None:
    # 2e-5 at 135 million; (135 / 500) ** 0.75 = 0.375 of it at 500 million, (135 / 1500) ** 0.75 = 0.164 of it at 1.5 billion.
    sizes = (800_000, 3_000_000, 135_000_000, 500_000_000, 1_500_000_000, 7_000_000_000, 70_000_000_000)
    assert [learning_rate(size) for size in sizes] == [3e-4, 3e-4, 2e-5, 7e-6, 3e-6, 1e-6, 1e-6]
    assert [learning_rate(size, adapters=True) for size in sizes[2:4]] == [2e-4, 7e-5]
    assert [copying_rate(size, 2e-3) for size in (sizes[0], sizes[2], sizes[5])] == [2e-3, 2e-4, 1e-5]


def test_an_answer_may_have_a_quarter_of_the_context() -> None:
    assert [max_tokens(context) for context in (2, 8, 24, 96, 512, 1024, 8192)] == [1, 2, 16, 24, 128, 256, 256]


def test_a_model_of_a_folder_gets_what_suits_its_size(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (context, derived, model_defaults):
        monkeypatch.setattr(module, "machine_bytes", lambda: 24 * 2**30)
    config = load_config(None, [f"model.path={large}"])
    assert (config.trainer.learning_rate, config.environment.max_tokens) == (2e-5, 256)
    # Activations: 4 bytes x (31 layers x (6 x 576 + 63 x 64 + 4 x 1536) a token + 4 x 2**24 logits); an eighth of 24 GB has 1680 tokens, 6 x 256 = 1536.
    assert config.trainer.micro_batch_tokens == 1536
    assert load_config(None, [f"model.path={large}", "lora.rank=8"]).trainer.learning_rate == 2e-4
    learning = load_config(None, [f"model.path={large}", "warm_start.target_accuracy=0.3"])
    assert learning.warm_start.learning_rate == 2e-4
    valued = load_config(None, [f"model.path={large}", "objective.advantage=gae"])
    assert valued.critic.learning_rate == 2e-4
    small = load_config(None, [f"model.path={folder_of_model(tmp_path / 'small')}"])
    assert (small.trainer.learning_rate, small.trainer.micro_batch_tokens) == (3e-4, 2048)


def test_what_is_set_stays(large: Path, tmp_path: Path) -> None:
    given = {"trainer.learning_rate": 1e-3, "environment.max_tokens": 7, "trainer.micro_batch_tokens": 99, "model.max_context": 300}
    config = load_config(None, [f"model.path={large}", *(f"{key}={value}" for key, value in given.items())])
    assert (config.trainer.learning_rate, config.environment.max_tokens) == (1e-3, 7)
    assert (config.trainer.micro_batch_tokens, config.model.max_context) == (99, 300)
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\npath = "{large}"\n[trainer]\nlearning_rate = 3e-4\n')
    assert load_config(file).trainer.learning_rate == 3e-4


def test_a_made_model_and_a_folder_that_is_not_there_keep_the_defaults(tmp_path: Path) -> None:
    for overrides in ([], [f"model.path={tmp_path}/nowhere"]):
        config = load_config(None, overrides)
        assert (config.trainer.learning_rate, config.environment.max_tokens, config.trainer.micro_batch_tokens) == (3e-4, 16, 2048)
        assert not [*model_defaults.shown_derived(config)]


def test_a_gpu_has_micro_batches_as_they_were(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_defaults, "machine_bytes", lambda: 2**30)
    assert load_config(None, [f"model.path={large}"]).trainer.micro_batch_tokens == 512, "not smaller, however little memory there is"
    assert load_config(None, [f"model.path={large}", "trainer.device=cuda"]).trainer.micro_batch_tokens == 4096


def test_the_dry_run_says_what_was_derived_and_why(large: Path) -> None:
    shown = io.StringIO()
    print_report(load_config(None, [f"model.path={large}", "model.max_context=512"]), Findings(), Console(file=shown, width=160))
    text = shown.getvalue()
    assert "trainer.learning_rate" in text and "2e-05: for 134," in text
    assert "environment.max_tokens" in text and "128: a part of a context of 512" in text
    assert "warm_start.learning_rate" not in text
    shown = io.StringIO()
    print_report(load_config(None, [f"model.path={large}", "trainer.learning_rate=1e-3"]), Findings(), Console(file=shown, width=160))
    assert "2e-05" not in shown.getvalue()
