"""The processes of one life: they meet, agree, compute alike, leave."""
from common.world.agreement import fingerprint_of, gather_texts, odd_ranks, same_everywhere, send
from common.world.determinism import bit_differences, bit_facts, require_same_bits
from common.world.join import join, leave
from common.world.rendezvous import lifelines, progress
from common.world.world import WATCHED, World

__all__ = [
    "WATCHED", "World", "bit_differences", "bit_facts", "fingerprint_of", "gather_texts", "join", "leave",
    "lifelines", "odd_ranks", "progress", "require_same_bits", "same_everywhere", "send",
]
