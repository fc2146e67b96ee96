r"""A worker outside: it claims rollouts of a run, asks the model under the address that it is given,
and posts the reward.

midflight train configs/demo.toml --set environment.entry=midflight.environments.claimed:claimed \
    --set run.steps=5
python examples/claims_worker.py runs/demo/endpoint.json
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
from openai import APIStatusError, AsyncOpenAI


async def work(endpoint: dict[str, Any]) -> None:
    """Until the run ends."""
    control = {"Authorization": f"Bearer {endpoint['control_token']}"}
    async with aiohttp.ClientSession(endpoint["url"]) as http:
        while True:
            async with http.post(
                "/midflight/v1/claims", json={"max": 1, "wait_seconds": 60}, headers=control
            ) as answer:
                if answer.status != 200:
                    return
                claims = await answer.json()
            for claim in claims:
                client = AsyncOpenAI(base_url=claim["base_url"], api_key=claim["api_key"])
                question = claim["task"]["data"]["question"]
                try:
                    reply = await client.chat.completions.create(
                        model="policy", messages=[{"role": "user", "content": question}]
                    )
                except APIStatusError:
                    # the run needs this rollout no more, as at the end of its training
                    continue
                reward = float(reply.choices[0].message.content == claim["task"]["data"]["answer"])
                owner = {"Authorization": f"Bearer {claim['owner_token']}"}
                await http.post(
                    f"/midflight/v1/sessions/{claim['session_id']}/reward",
                    json={"reward": reward},
                    headers=owner,
                )


if __name__ == "__main__":
    with contextlib.suppress(aiohttp.ClientConnectionError):
        asyncio.run(work(json.loads(Path(sys.argv[1]).read_text())))
