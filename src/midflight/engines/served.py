"""What an engine needs beside its port to be served over the wire."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from midflight.ports import Engine
from midflight.text.tokenizer import Tokenizer
from midflight.types import Chunk, EngineHealth, GenerateRequest


class ServedEngine(Engine, Protocol):
    @property
    def tokenizer(self) -> Tokenizer: ...
    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """As the port has it; it must be closable, because clients leave."""
        ...

    def reading(self) -> EngineHealth:
        """The present numbers, at once, also of an engine that has ended."""
        ...
