"""OpenHands' own agent does a task, through its SDK: `python openhands_task.py TASK`. It runs in an environment of its own, in the folder of the task.

`LLM_BASE_URL`, `LLM_API_KEY` and `LLM_MODEL` say who answers it, as its documentation has them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from openhands.sdk import LLM, Conversation
from openhands.sdk.conversation.response_utils import get_agent_final_response
from openhands.tools.preset.default import get_default_agent

llm = LLM(model=os.environ["LLM_MODEL"], base_url=os.environ["LLM_BASE_URL"], api_key=os.environ["LLM_API_KEY"], usage_id="agent")
conversation = Conversation(agent=get_default_agent(llm=llm, cli_mode=True), workspace=str(Path.cwd()))
conversation.send_message(sys.argv[1])
conversation.run()
print(get_agent_final_response(conversation.state.events))
