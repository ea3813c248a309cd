"""What happens to whom, and when: drawn from the seed alone, so that a schedule can be repeated (its instants
cannot).
"""

import collections

Event = collections.namedtuple("Event", "target signal point steps", defaults=("", 0))

# target: weight. A point is struck by the process that comes by it; everything else comes from outside at a
# random instant.
TARGETS = {
    "point": 44,
    "pair": 8,
    "worker": 22,
    "loader": 16,
    "workers": 4,
    "agent": 6,
    "node": 5,
    "store": 2,
    "job": 4,
    "resize": 5,
    "grow": 5,
    "freeze": 0.5,
    "stall": 0.5,
    "lock": 0.5,
    "bunch": 1e-9,  # by itself alone: plain torchrun may wait for 300 s
}
RARE = ("freeze", "stall", "lock")  # they cost half a minute each
SIGNALS = {
    "point": {"KILL": 78, "SEGV": 12, "TERM": 7, "INT": 3},
    "worker": {"KILL": 55, "TERM": 10, "INT": 6, "USR1": 4, "SEGV": 6, "TERM TERM": 5, "STOP CONT": 14},
    "loader": {"KILL": 70, "SEGV": 6, "TERM": 12, "STOP CONT": 12},
    "stall": {"STOP": 1},
    "workers": {"KILL": 2, "TERM": 1},
    "resize": {"TERM": 1},
}
GROUPS = {"step": 34, "save": 44, "evaluation": 14, "end": 8}
SHORT = [
    Event(*words.split())
    for words in (
        "point KILL write:model.safetensors",
        "point KILL rename",
        "point SEGV step-torn",
        "pair KILL restore",
        "agent KILL",
        "node KILL",
        "job KILL",
        "resize TERM",
        "grow KILL",
        "store KILL",
        "loader KILL",
    )
]
SHORT += [Event("worker", "STOP CONT"), Event("worker", "TERM TERM")]


def choose(rng, weights):
    return rng.choices(list(weights), list(weights.values()))[0]


def draw(rng, points, only, rare):
    """One event; `rare`: also of RARE."""
    targets = {
        target: weight
        for target, weight in TARGETS.items()
        if (rare or target not in RARE) and (not only or target in only)
    }
    target = choose(rng, targets)
    name = choose(rng, SIGNALS.get(target, {"KILL": 1}))
    at = ""
    if target == "point":
        at = rng.choice(points[choose(rng, GROUPS)])
    elif target == "pair":  # a second one dies of the first one's consequences
        at = rng.choice(points[rng.choice(["life", "save"])])
    elif target == "lock":
        name = "LOCK"
        at = "forward"
    return Event(target, name, at)


def schedule(rng, count, points, short=False, only=()):
    """`count` events in random order; a short one holds one of each kind that matters most."""
    events = SHORT[:count] if short else []
    events = events + [draw(rng, points, only, not short) for _ in range(count - len(events))]
    rng.shuffle(events)
    return [event._replace(steps=rng.randint(0, 9)) for event in events]
