"""An agent of Pydantic AI, as it comes: `pip install 'pydantic-ai-slim[openai]'`."""

from difflib import SequenceMatcher

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def backwards(word: str) -> str:
    """Spells a word backwards."""
    return word[::-1]


async def solve(task, client):
    model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
    ended = await Agent(model, tools=[backwards]).run(task.data["question"])
    return SequenceMatcher(None, ended.output, task.data["answer"]).ratio()
