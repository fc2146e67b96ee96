from __future__ import annotations

import pytest
import torch

from midflight.errors import ConfigError
from midflight.trainer.supervised import SupervisedTrainer

from .fixtures import tiny_model

EXAMPLES = [([257, *b"abc", 256, 258], [*b"cba", 256]), ([257, *b"no", 256, 258], [*b"on", 256])]


def test_the_loss_is_the_mean_over_answer_tokens() -> None:
    model = tiny_model()
    nats: list[float] = []
    for prompt, answer in EXAMPLES:
        ids = torch.tensor([*prompt, *answer])
        table = model(ids[None]).logits[0].log_softmax(-1)
        nats += [-float(table[t - 1, ids[t]].detach()) for t in range(len(prompt), len(ids))]
    assert SupervisedTrainer(model, learning_rate=1e-3).step(EXAMPLES) == pytest.approx(sum(nats) / 7, rel=1e-12)


def test_the_answers_are_learned() -> None:
    ours = SupervisedTrainer(tiny_model(torch.float32), learning_rate=1e-2, micro_batch_tokens=8)
    losses = [ours.step(EXAMPLES) for _ in range(30)]
    assert losses[0] > 4 and losses[-1] < 0.5


def test_an_empty_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match="example 1"):
        SupervisedTrainer(tiny_model(), learning_rate=1e-2).step([EXAMPLES[0], ([1], [])])
