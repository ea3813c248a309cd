"""The processes of one life: they meet, agree, compute alike, leave."""

from common.world.rendezvous import lifelines
from common.world.world import (
    MAY_DIFFER,
    WATCHED,
    World,
    bit_facts,
    fingerprint_of,
    gather,
    has_peers,
    join,
    leave,
    pin,
    same_everywhere,
)
