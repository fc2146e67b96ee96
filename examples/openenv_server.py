"""A server of OpenEnv that counts letters, for docs/adapters/openenv.md: `python
examples/openenv_server.py 8001`.
"""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import create_model

Said = create_model("Said", __base__=Action, said=(str, ...))
Shown = create_model("Shown", __base__=Observation, shown=(str, ""))


class Counting(Environment):
    """Asks once. An answer of an odd number of letters is worth 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State(step_count=0)

    def reset(self, seed=None, episode_id=None, **options):
        return Shown(shown=f"Say something about {seed}.")

    def step(self, action, timeout_s=None, **options):
        return Shown(done=True, reward=float(len(action.said) % 2))


app = create_fastapi_app(Counting, Said, Shown, max_concurrent_envs=256)
uvicorn.run(app, port=int(sys.argv[1]))
