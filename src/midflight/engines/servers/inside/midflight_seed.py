"""Runs inside servers: seeds of single tokens. They give an answer that goes on after an
interruption the noise that it would have had.
"""

import hashlib


def mixed(seed, position):
    """The seed of the token at `position` in its sequence, from 0 to 2^63 - 1."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63
