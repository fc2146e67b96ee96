"""The measurements of `midflight init --model`, which `midflight.run.launcher.measure` makes.
Importing this needs no torch.
"""

import msgspec

ENDED_SHARE = 0.9
"""If this share of the answers ended by themselves, a limit at the length of the longest would cut
few answers short.
"""
FAIR_TOKENS = 256
"""The tokens within which a model that talks should have ended an answer."""
WIDTHS = (1, 8, 32)
"""The numbers of requests at once with which the engine is measured."""


class ModelMeasurements(msgspec.Struct, frozen=True):
    """The answers of a model, and its speed on this machine."""

    threads: int
    """The threads with which engine and trainer computed, one after the other."""
    prompt_length: int
    """The median of the tasks' prompts, in tokens."""
    longest_prompt: int
    ended: tuple[int, ...]
    """Tokens of the answers that ended by themselves, the shortest first."""
    num_cut: int
    """Answers that had not ended after `most_tokens`."""
    most_tokens: int
    num_right: int
    """Answers that were right as `reward` judges."""
    reward: str
    """The reward that can judge the tasks: `number_match` if each answer is a number, else
    `exact_match`.
    """
    closes: bool
    """The chat template closes an answer with a token that ends one."""
    question: str
    """The first question that the model was asked."""
    answer: str
    """Its answer to that."""
    engine_rates: tuple[tuple[int, float], ...]
    """Requests together, and output tokens of all of them for a second that its threads compute."""
    trainer_rate: float
    """The same of a forward and a backward."""

    @property
    def num_answers(self) -> int:
        return len(self.ended) + self.num_cut

    @property
    def ends(self) -> bool:
        """True if its answers come to an end. A large model's answers have little room here, so
        there only the chat template is asked.
        """
        has_ended = len(self.ended) >= self.num_answers / 2
        return self.closes and (has_ended or self.most_tokens < FAIR_TOKENS)

    @property
    def mean_answer(self) -> float:
        return (sum(self.ended) + self.num_cut * self.most_tokens) / self.num_answers

    @property
    def answer_room(self) -> int | None:
        """Tokens that nearly all answers fit in, or None if too many had not ended."""
        return max(self.ended) if len(self.ended) >= ENDED_SHARE * self.num_answers else None
