"""The formats in which models write their messages. Tool calls and thinking are between markers
inside one text.
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
