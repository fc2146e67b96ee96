"""A react agent of LangGraph, as it comes: `pip install langgraph langchain-openai`."""

from difflib import SequenceMatcher

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def backwards(word: str) -> str:
    """Spells a word backwards."""
    return word[::-1]


async def solve(task, client):
    model = ChatOpenAI(model="policy", base_url=str(client.base_url), api_key=client.api_key)
    agent = create_react_agent(model, [backwards])
    asked = {"messages": [("user", task.data["question"])]}
    state = await agent.ainvoke(asked, {"recursion_limit": 8})
    return SequenceMatcher(None, state["messages"][-1].text, task.data["answer"]).ratio()
