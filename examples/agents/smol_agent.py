"""The tool-calling agent of smolagents, as it comes: `pip install 'smolagents[openai]'`.

By default it forces calls. These are sampled under a grammar, so they are left out of the loss;
hence `tool_choice="auto"`. Its prompts are long: set `model.max_context=16384`.
"""

from difflib import SequenceMatcher

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def backwards(word: str) -> str:
    """Spells a word backwards.

    Args:
        word: The word.
    """
    return word[::-1]


def solve(task, client):
    model = OpenAIServerModel(
        "policy", api_base=str(client.base_url), api_key=client.api_key, tool_choice="auto"
    )
    agent = ToolCallingAgent(tools=[backwards], model=model, max_steps=2, verbosity_level=0)
    return SequenceMatcher(None, str(agent.run(task.data["question"])), task.data["answer"]).ratio()
