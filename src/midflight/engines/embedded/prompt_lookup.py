"""Guesses of the next tokens of a sequence. If its last tokens have occurred in it before, the
guess is the tokens that followed them there.

A guess is never taken on trust. The step that computes the sequence's last token computes the
guesses behind it too, and samples behind each of them. The noise of a token depends on seed and
position alone, so that a guess is accepted exactly if it equals the token that a step of one token
would have sampled. Tokens and log-probabilities are the same, only earlier (I5). Nothing has to be
rejected at random, as it is in Leviathan et al. 2023, section 2.3, where the noise is drawn anew.
The guesses come from Saxena 2023 (prompt lookup decoding).
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_WIDTHS = (3, 2)
"""The numbers of last tokens that must have occurred before, tried in this order."""


def guess(tokens: Ints, *, most: int) -> Ints:
    """Guesses at most `most` tokens after `tokens` [L]. They are the tokens after the last place
    with the same end, and are repeated if they are fewer than `most`. Returns an empty guess if the
    end is new.
    """
    for width in _WIDTHS:
        if width >= len(tokens):
            continue
        ends = np.flatnonzero(tokens[width - 1 : -1] == tokens[-1]) + width - 1
        for back in range(1, width):
            ends = ends[tokens[ends - back] == tokens[-1 - back]]
        if len(ends):
            return np.resize(tokens[ends[-1] + 1 :], most)
    return tokens[:0]
