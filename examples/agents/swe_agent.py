"""mini-swe-agent, as it comes, in a Python environment of its own: `pip install midflight
mini-swe-agent`.

What the model writes is run: `BubblewrapEnvironment` (needs `bwrap`) protects the machine's files,
not the network; `environments.local.LocalEnvironment` protects nothing. Score what the agent left
in `shell.working_dir`, or the `submission` that `agent.run` returns. This scores the first answer.
"""

from difflib import SequenceMatcher

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.models.litellm_model import LitellmModel


def solve(task, client):
    reach = {"api_base": str(client.base_url), "api_key": client.api_key}
    model = LitellmModel(
        model_name="openai/policy", model_kwargs=reach, cost_tracking="ignore_errors"
    )
    shell = BubblewrapEnvironment(timeout=10)
    try:
        agent = DefaultAgent(
            model,
            shell,
            system_template="Use the shell.",
            instance_template="{{task}}",
            step_limit=3,
        )
        agent.run(task.data["question"])
    finally:
        shell.cleanup()
    answers = [
        message["extra"]["response"]
        for message in agent.messages
        if "response" in message.get("extra", {})
    ]
    said = answers[0]["choices"][0]["message"]["content"] or ""
    return SequenceMatcher(None, said, task.data["answer"]).ratio()
