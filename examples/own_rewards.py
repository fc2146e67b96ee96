"""Two rewards of one's own, as `configs/own-data.toml` names them. A function gets what its parameters name: `completion`, the last answer
as a text; the columns of the task's row; or `task` and `messages`, the whole conversation.

midflight train configs/own-data.toml
"""


def correct(completion: str, answer: str) -> float:
    """1 for the number that was asked for and nothing else."""
    return float(completion.strip() == answer)


def brief(completion: str) -> float:
    """1 for an answer that is a number at all."""
    return float(completion.strip().isdigit())
