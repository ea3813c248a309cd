"""The processes of one life: they meet, agree, compute alike, leave."""
from common.world.determinism import bit_differences, bit_facts, require_same_bits
from common.world.rendezvous import lifelines, progress
from common.world.world import (
    WATCHED,
    World,
    fingerprint_of,
    gather_texts,
    join,
    leave,
    odd_ranks,
    same_everywhere,
    send,
)

__all__ = [
    "WATCHED", "World", "bit_differences", "bit_facts", "fingerprint_of", "gather_texts", "join", "leave",
    "lifelines", "odd_ranks", "progress", "require_same_bits", "same_everywhere", "send",
]
