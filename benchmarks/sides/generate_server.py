"""`transformers`' own `generate` behind `/v1/completions`, for `serving.py`: all requests that wait
are one batch, the next batch waits for its end.

    python -m sides.generate_server FOLDER PORT THREADS

Prompts are token ids of one length, and answers have the length that is asked for, so nothing is
padded and no batch outlives its shortest row.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

GATHERED_SECONDS = 0.02
"""All requests of a round come within this time."""


class Batches:
    """Requests by the one batch that they are answered in."""

    def __init__(self, folder: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[int]]] = []
        self._lock = asyncio.Lock()

    async def complete(self, request: web.Request) -> web.Response:
        """Waits for the batch before, and for its own."""
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((await request.json(), done))
        await asyncio.sleep(GATHERED_SECONDS)
        async with self._lock:
            if not done.done():
                await self._answer()
        return web.json_response({"choices": [], "usage": {"completion_tokens": await done}})

    async def _answer(self) -> None:
        batch = self._waiting
        self._waiting = []
        prompts = torch.tensor([body["prompt"] for body, _ in batch])
        answer = int(batch[0][0]["max_tokens"])
        await asyncio.to_thread(self._generated, prompts, answer)
        for _, done in batch:
            done.set_result(answer)

    @torch.inference_mode()
    def _generated(self, prompts: torch.Tensor, answer: int) -> None:
        torch.set_num_threads(int(sys.argv[3]))
        found = self._model.generate(
            prompts,
            do_sample=True,
            top_k=0,
            temperature=1.0,
            min_new_tokens=answer,
            max_new_tokens=answer,
        )
        assert found.shape[1] == prompts.shape[1] + answer


def main() -> None:
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/completions", Batches(sys.argv[1]).complete)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[2]), print=None)


if __name__ == "__main__":
    main()
