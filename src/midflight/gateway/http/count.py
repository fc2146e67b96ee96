"""Anthropic's `POST /v1/messages/count_tokens`: how long a prompt is, without an answer to it."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from midflight.errors import UnknownModel, nearest
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.dialects.faults import log_unexpected
from midflight.gateway.dialects.fields import parse
from midflight.gateway.dialects.messages import messages_fault
from midflight.gateway.dialects.messages_input import PromptBody
from midflight.gateway.http.wire import ClientGone, api_key, read_body, send_fault, send_json
from midflight.gateway.sessions.call import CompletionCall


class CountEndpoint:
    """Counts what `/v1/messages` would send. It leaves no trace in the session: no turn, no failed request."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Waits for the body; ended by it, or by the client who goes."""
        try:
            session = self._gateway.session_for(path_token=scope["path_params"].get("token"), api_key=api_key(scope))
            sent = await read_body(receive)
            body = parse(PromptBody, sent)
            if body.model != self._gateway.model:
                known = self._gateway.model
                raise UnknownModel(f"the model {body.model!r} does not exist.{nearest(body.model, [known])}", param="model")
            prompt = body.prompt()
            await self._gateway.check_lengths(CompletionCall((prompt,), prompt_param="messages"), num_bytes=len(sent))
            await send_json(send, {"input_tokens": self._gateway.count(session, prompt)})
        except ClientGone:
            return
        except Exception as error:  # the edge: every error becomes an answer
            log_unexpected(error)
            await send_fault(send, messages_fault(error))
