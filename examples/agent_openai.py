"""An agent on the plain OpenAI SDK, which knows nothing of Midflight. Serve a model folder first:

midflight serve --model runs/demo/model --port 8000
python examples/agent_openai.py --base-url http://127.0.0.1:8000/v1 hello
"""

from __future__ import annotations

import argparse
import asyncio

from openai import AsyncOpenAI

PROMPT = "reverse {word}"
"""As in configs/demo.toml: a small model knows only the words it was trained on."""


async def ask(client: AsyncOpenAI, word: str) -> str:
    """Prints the answer while it is generated, and returns it whole."""
    stream = await client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": PROMPT.format(word=word)}],
        max_tokens=10,
        temperature=1.0,
        stream=True,
    )
    pieces: list[str] = []
    async for chunk in stream:
        piece = chunk.choices[0].delta.content if chunk.choices else None
        print(piece or "", end="", flush=True)
        pieces.append(piece or "")
    return "".join(pieces)


async def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a served policy to spell words backward.")
    parser.add_argument("words", nargs="+")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    options = parser.parse_args()
    async with AsyncOpenAI(base_url=options.base_url, api_key="unused") as client:
        for word in options.words:
            print(f"{word} -> ", end="")
            answer = await ask(client, word)
            print("  right" if answer.strip() == word[::-1] else f"  wrong, it is {word[::-1]}")


if __name__ == "__main__":
    asyncio.run(main())
