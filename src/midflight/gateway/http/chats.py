"""Chats from inside this process, without HTTP."""

from collections.abc import Sequence
from typing import Any, cast

from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.dialects.chat import conversation
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.gateway.http.http import DIALECTS
from midflight.gateway.sessions.request import CompletionCall, Messages
from midflight.text import Message
from midflight.wire import edge


class InProcessChats:
    """Implements `ports.Chats`. It does the same as `CompletionEndpoint` with a chat, but reads and
    writes no JSON.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def reply(self, token: str, messages: Sequence[Message]) -> str:
        """Waits for the whole answer. The caller's cancellation ends the wait."""
        gateway = self._gateway
        session = None
        unread = UnreadFields()
        try:
            session = gateway.session_for(path_token=token, api_key=None)
            read = conversation(cast(Any, messages), unread)
            call = CompletionCall((Messages(read),), prompt_param="messages")
            gateway.pass_over(unread, path=DIALECTS[0].path)
            num_bytes = sum([len(str(message.get("content"))) for message in messages])
            await gateway.check_lengths(call, num_bytes=num_bytes)
            gateway.requests.check_room()
            [answer] = await gateway.answers(gateway.prepare(session, call))
            return answer.message.content
        except Exception as error:  # the edge: every error is counted
            edge.log_unexpected(error)
            gateway.failed(session, error)
            raise
