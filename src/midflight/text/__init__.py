"""Between text and tokens: tokenizer, chat template, incremental detokenisation, stop strings. Knows no station and no torch."""

from midflight.text.detokenizer import IncrementalDetokenizer, StopMatch, StopMatcher
from midflight.text.template import ChatTemplate, Message
from midflight.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Message", "StopMatch", "StopMatcher", "Tokenizer"]
