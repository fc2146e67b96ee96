"""An agent that summarises its history is trained on its summaries, with the reward of the rollout."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.gateway.offered import KEY, ScriptedGenerator, offered

from midflight.gateway.answers.plan import EngineLimits
from midflight.testing.script import scripted_tokenizer
from midflight.testing.virtual_time import run_virtual
from midflight.trajectories.packing import pack
from midflight.types import Batch, Group, SamplingParams, Trajectory

LIMITS = EngineLimits(max_context=4096, vocab_size=262)
ANSWERS = ["one", "two", "summary of both", "three", "four"]


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_summaries_and_what_came_before_and_after_them_are_trained_once_with_the_final_reward(dialect: str) -> None:
    tokenizer = scripted_tokenizer()

    async def main() -> None:
        generator = ScriptedGenerator(texts=[f"{text}<|end|>" for text in ANSWERS])
        async with offered(generator, limits=LIMITS) as it:
            handle = it.gateway.open(KEY, sampling=SamplingParams(max_tokens=64), tracked=True)
            path = {"chat": "/v1/chat/completions", "messages": "/v1/messages"}[dialect]
            messages: list[dict[str, Any]] = []

            async def turn(question: str) -> str:
                messages.append({"role": "user", "content": question})
                body = {"model": "policy", "max_tokens": 64, "messages": messages}
                answer = (await it.http.post(f"http://memory/s/{handle.api_key}{path}", content=json.dumps(body))).json()
                said = answer["choices"][0]["message"]["content"] if dialect == "chat" else answer["content"][0]["text"]
                messages.append({"role": "assistant", "content": said})
                return said

            await turn("begin")
            await turn("go on")
            summary = await turn("Summarise what you did.")
            messages.clear()
            messages.append({"role": "user", "content": f"So far: {summary}"})
            messages.append({"role": "assistant", "content": "Understood."})
            await turn("go on")
            await turn("and on")

            record = it.gateway.close(handle.session_id)
            assert (record.num_turns, record.num_branches, record.num_rewritten) == (5, 1, 0)
            trajectory = Trajectory(KEY, "t", "s", 0.75, record.rows)
            batch = pack(Batch(1, 0, (Group(KEY.group, "t", "s", (trajectory,)),)))
            rows = [tokenizer.decode(tuple(row.token_ids[row.loss_mask])) for row in record.rows]
            assert rows == ["one<|end|>two<|end|>summary of both<|end|>", "three<|end|>four<|end|>"]
            assert batch.row_rollout.tolist() == [0, 0], "both rows are of one rollout, which has one advantage"
            assert batch.rewards.tolist() == [0.75]
            read = tokenizer.decode(tuple(record.rows[1].token_ids[~record.rows[1].loss_mask]))
            assert "So far: summary of both" in read, "in the second row the summary is context"

    run_virtual(main())
