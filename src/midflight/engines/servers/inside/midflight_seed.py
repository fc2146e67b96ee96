"""Runs inside servers. It makes seeds of single tokens, so that an answer that goes on after an
interruption gets the same noise as without it.
"""

import hashlib


def mixed(seed, position):
    """The seed of the token at `position` in its sequence, from 0 to 2^63 - 1."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63
