"""Runs inside servers: seeds of single tokens, so that an answer that goes on after an interruption
has the noise it would have had.
"""

import hashlib


def mixed(seed, position):
    """From 0 to 2^63 - 1; `position` is that of the token in its sequence."""
    return (
        int.from_bytes(
            hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest(), "little"
        )
        % 2**63
    )
