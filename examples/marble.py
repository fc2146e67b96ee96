"""A tiny model for the taskset of the package `marble-v1`, and layouts of chance that show it how
an answer is written.

    python examples/marble.py runs/marble
    midflight train configs/marble.toml

A marble falls, and the model says where a piece stands that deflects it into a ring. In these
layouts the piece is the task's own, and its place and its turn are drawn at random about where the
marble falls: what hits, the model learns by trying. The tokenizer is its own too: lines that all
tasks share are one token, so a prompt of 1700 letters has about thirty.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from itertools import groupby
from pathlib import Path

SEED = 1_000_000
"""Where the levels of these prompts begin: far above those of the run."""
SHOWN = 80
ANSWERS = 16
"""Tasks, and layouts for each."""


def prompts(number: int) -> list[str]:
    """What levels of the taskset ask. Takes a tenth of a second for each."""
    from midflight.adapters.verifiers import tasks

    return [
        str(task["question"])
        for task in tasks("marble-v1", size=number, options={"seed": SEED, "ring_half_width": 240})
    ]


def layout(prompt: str, chance: random.Random) -> str:
    """A legal answer: the piece that the task gives, in the part of the grid through which the
    marble falls, turned anyhow.
    """
    kind = re.findall(r"^- 1 x (\w+)$", prompt, re.MULTILINE)[0]
    return json.dumps(
        [
            {
                "kind": kind,
                "x": chance.randrange(300, 480, 20),
                "y": chance.randrange(-1160, -740, 20),
                "rot": chance.randint(-12, 12),
            }
        ]
    )


def make_model(folder: Path, asked: list[str], answers: list[str]) -> None:
    """Of random weights, with a tokenizer for these texts. Imports torch."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from midflight.models.creation import make_model
    from midflight.models.export import export_model
    from midflight.text.byte_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS

    lines = [prompt.splitlines(keepends=True) for prompt in asked]
    shared = set(lines[0]).intersection(*lines)
    backend = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\d"), behavior="isolated")
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    backend.decoder = decoders.ByteLevel()
    learnt = [line for prompt in lines for line in prompt if line not in shared]
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([*learnt, *answers], trainer)
    runs = ["".join(run) for is_shared, run in groupby(lines[0], shared.__contains__) if is_shared]
    backend.add_tokens([AddedToken(run, normalized=False) for run in runs])
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
    )
    vocabulary = backend.get_vocab()
    model = make_model(
        vocab_size=len(vocabulary),
        hidden_size=96,
        intermediate_size=256,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        max_context=256,
        seed=0,
        dtype="float32",
        eos_token_id=vocabulary["<|end|>"],
        pad_token_id=vocabulary["<|pad|>"],
    )
    with tempfile.TemporaryDirectory() as written:
        tokenizer.save_pretrained(written)
        export_model(model, Path(written), folder)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    chance = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    asked = prompts(SHOWN)
    shown = [(prompt, layout(prompt, chance)) for _ in range(ANSWERS) for prompt in asked]
    told = [
        {
            "messages": [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer},
            ]
        }
        for prompt, answer in shown
    ]
    (folder / "layouts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in told))
    make_model(folder / "model", asked, [answer for _, answer in shown])
