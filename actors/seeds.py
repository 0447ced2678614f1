"""Seeds that follow from others."""

from __future__ import annotations

import hashlib


def stable_seed(seed: int, name: str) -> int:
    """A 63-bit seed that depends on nothing but its arguments."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
