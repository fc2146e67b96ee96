"""The methods of OpenAI's, Anthropic's and Google's SDKs that have no route here, each with what to use
instead. `docs/methods.md` is made from this table and from the SDKs.
"""

import re
from collections.abc import Mapping

from midflight.errors import NotOffered
from midflight.gateway.dialects.contents import contents_fault
from midflight.gateway.dialects.messages import messages_fault
from midflight.wire.edge import Fault, fault_of

_ACCOUNTS = "there are no accounts here; POST /midflight/v1/sessions opens a session"
_AGENTS = (
    "agents run in programs of their own; POST /v1/responses with a conversation keeps what was "
    "said"
)
_BATCHES = "engines batch what comes together; send each request by itself"
_EMBEDS = "the model generates, and embeds nothing; leave that to another server"
_FILES = "no files are kept here; write their text into the messages"
_LIVE = "the model reads and writes text, over HTTP; POST /v1/responses with stream"
_MEDIA = "the model reads and writes text alone; leave that to another server"
_ONE_MODEL = "there is one model, that of the run, which no client changes"
_SECRETS = "no secrets are kept here; the agent's own program holds them"
_CALLS = "nobody is called here; read the stream, or wait for the answer"
_STORES = "nothing is searched here; give the model a tool that searches in the agent's own program"
_TRAINS = "`midflight train` trains the model that is served here"
_JUDGED = "nothing is moderated here; judge answers in the reward of an environment"
_MACHINES = "tools run in the agent's own program, or in the sandbox of an environment"

NOT_OFFERED: Mapping[str, str] = {
    "/v1/agents": _AGENTS,
    "/v1/assistants": _AGENTS,
    "/v1/audio": _MEDIA,
    "/v1/batches": _BATCHES,
    "/v1/chat/completions": (
        "chats are not kept by id; POST /v1/responses keeps its answers, and a session's record "
        "has its tokens"
    ),
    "/v1/chatkit": _AGENTS,
    "/v1/containers": _MACHINES,
    "/v1/content_provenance_checks": _JUDGED,
    "/v1/decisions": _JUDGED,
    "/v1/deployment_runs": _AGENTS,
    "/v1/deployments": _AGENTS,
    "/v1/dreams": _AGENTS,
    "/v1/embeddings": _EMBEDS,
    "/v1/environments": _MACHINES,
    "/v1/evals": "`midflight evaluate` scores held-out tasks",
    "/v1/files": _FILES,
    "/v1/fine_tuning": _TRAINS,
    "/v1/images": _MEDIA,
    "/v1/live": _LIVE,
    "/v1/memory_stores": _AGENTS,
    "/v1/messages/batches": _BATCHES,
    "/v1/models/*": _ONE_MODEL,
    "/v1/moderations": _JUDGED,
    "/v1/organization": _ACCOUNTS,
    "/v1/organizations": _ACCOUNTS,
    "/v1/projects": _ACCOUNTS,
    "/v1/realtime": _LIVE,
    "/v1/responses": _LIVE,
    "/v1/responses/compact": (
        "a conversation is read whole; ask for a summary by POST /v1/responses, and go on from that"
    ),
    "/v1/safety": _JUDGED,
    "/v1/sessions": _AGENTS,
    "/v1/skills": "skills are texts; write them into the instructions",
    "/v1/threads": _AGENTS,
    "/v1/tunnels": _MACHINES,
    "/v1/uploads": _FILES,
    "/v1/user_profiles": _ACCOUNTS,
    "/v1/vaults": _SECRETS,
    "/v1/vector_stores": _STORES,
    "/v1/videos": _MEDIA,
    "/v1/webhook_endpoints": _CALLS,
    "/v1/webhook_event_types": _CALLS,
    "/upload/v1beta/environments": _MACHINES,
    "/upload/v1beta/files": _FILES,
    "/upload/v1beta/fileSearchStores": _STORES,
    "/v1beta/agents": _AGENTS,
    "/v1beta/auth_tokens": _ACCOUNTS,
    "/v1beta/batches": _BATCHES,
    "/v1beta/cachedContents": (
        "engines find common prefixes by themselves; send the whole conversation as contents"
    ),
    "/v1beta/credentials": _SECRETS,
    "/v1beta/decisions": _JUDGED,
    "/v1beta/environments": _MACHINES,
    "/v1beta/fileSearchStores": _STORES,
    "/v1beta/files": _FILES,
    "/v1beta/files:register": _FILES,
    "/v1beta/interactions": _AGENTS,
    "/v1beta/triggers": _AGENTS,
    "/v1beta/tunedModels": _TRAINS,
    "/v1beta/voices": _MEDIA,
    "/v1beta/webhooks": _CALLS,
    "/ws": _LIVE,
    "/v1beta/models/*": _ONE_MODEL,
    "/v1beta/models/*:embedContent": _EMBEDS,
    "/v1beta/models/*:batchEmbedContents": _EMBEDS,
    "/v1beta/models/*:asyncBatchEmbedContent": _EMBEDS,
    "/v1beta/models/*:batchGenerateContent": _BATCHES,
    "/v1beta/models/*:predict": _MEDIA,
    "/v1beta/models/*:predictLongRunning": _MEDIA,
}
"""What to do instead, by the beginning of the path. The longest beginning counts. A `*` stands for
anything. Google's paths end in a verb, and stand for those of its version `v1` too.
"""
_MODELS = "/v1beta/models/*"
_GOOGLES = re.compile("(/upload)?/v1beta/")


def row_of(path: str) -> str | None:
    """The row for a path, or `None` if no SDK has a method there."""
    by_verb = f"{_MODELS}:{path.rpartition(':')[2]}"
    if path.startswith(("/v1beta/models/", "/v1/models/")) and by_verb in NOT_OFFERED:
        return by_verb
    return _beginning_of(path) or _beginning_of(path.replace("/v1/", "/v1beta/", 1))


def _beginning_of(path: str) -> str | None:
    beginning = path
    while beginning:
        if beginning in NOT_OFFERED:
            return beginning
        beginning = beginning.rpartition("/")[0]
        if f"{beginning}/*" in NOT_OFFERED:
            return f"{beginning}/*"
    return None


def refusal(method: str, path: str, headers: Mapping[bytes, bytes]) -> Fault | None:
    """The refusal of a request whose path and method have no route, in the form that its client
    reads. `None` if no SDK has such a method.
    """
    asked = path
    if asked.startswith("/s/"):
        asked = "/" + asked[3:].partition("/")[2]
    row = row_of(asked)
    if row is None:
        return None
    error = NotOffered(f"{method} {asked[:200]} is not offered here: {NOT_OFFERED[row]}.")
    if _GOOGLES.match(row) or b"x-goog-api-key" in headers:
        return contents_fault(error)
    return messages_fault(error) if b"anthropic-version" in headers else fault_of(error)
