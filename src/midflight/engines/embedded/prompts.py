"""Sharing the prefill of identical prompts: the rollouts of a group ask the same question."""

from __future__ import annotations

Prompt = tuple[int, ...]


class SharedPrompts:
    """Which slot holds the keys of which prompt, all made under the weights now served.

    A slot stays a donor after its request has ended, until the slot is taken again. `forget_all` at every change of weights keeps
    keys from crossing versions.
    """

    def __init__(self) -> None:
        self._donors: dict[Prompt, int] = {}
        self._prefilling: dict[Prompt, int] = {}
        self._held: dict[int, Prompt] = {}

    def donor(self, prompt: Prompt) -> int | None:
        """A slot that holds the prompt complete."""
        return self._donors.get(prompt)

    def is_prefilling(self, prompt: Prompt) -> bool:
        """Whether some slot will become a donor of the prompt."""
        return prompt in self._prefilling

    def begin(self, prompt: Prompt, slot: int) -> None:
        """The slot starts to compute the prompt's keys; others with that prompt may wait for it."""
        self._prefilling[prompt] = slot

    def complete(self, prompt: Prompt, slot: int) -> None:
        """The slot holds the prompt complete. Ignored unless it began under the weights now served."""
        if self._prefilling.get(prompt) == slot:
            del self._prefilling[prompt]
            self.hold(prompt, slot)

    def hold(self, prompt: Prompt, slot: int) -> None:
        """The slot holds the prompt; the newest holder is the donor, because it is overwritten last."""
        self._donors[prompt] = slot
        self._held[slot] = prompt

    def end(self, prompt: Prompt, slot: int) -> None:
        """The slot's request ended; if it was prefilling, it will never be a donor."""
        if self._prefilling.get(prompt) == slot:
            del self._prefilling[prompt]

    def overwrite(self, slot: int) -> None:
        """The slot is taken by another request: what it held is gone."""
        prompt = self._held.pop(slot, None)
        if prompt is not None and self._donors.get(prompt) == slot:
            del self._donors[prompt]

    def forget_all(self) -> None:
        self._donors.clear()
        self._prefilling.clear()
        self._held.clear()
