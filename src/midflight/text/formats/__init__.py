"""How a model writes its messages: tool calls and thinking, between markers of its own, inside one
text.
"""

from midflight.text.formats.assistant import (
    ArgumentsPiece,
    AssistantMessage,
    CallPiece,
    ContentPiece,
    MessageParser,
    Piece,
    ReasoningPiece,
    Tool,
    ToolCall,
)
from midflight.text.formats.format import MessageFormat

__all__ = [
    "ArgumentsPiece",
    "AssistantMessage",
    "CallPiece",
    "ContentPiece",
    "MessageFormat",
    "MessageParser",
    "Piece",
    "ReasoningPiece",
    "Tool",
    "ToolCall",
]
