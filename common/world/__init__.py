"""The processes of one life: they meet, agree, compute alike, leave."""

from common.world.determinism import bit_differences, bit_facts
from common.world.rendezvous import lifelines
from common.world.world import (
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
    "World",
    "bit_differences",
    "bit_facts",
    "fingerprint_of",
    "gather_texts",
    "join",
    "leave",
    "lifelines",
    "odd_ranks",
    "same_everywhere",
    "send",
]
