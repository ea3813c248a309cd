"""The order of the micro batches: which stage works on which of them at each tick, forward or back.

    1f1b: 3 stages,   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3     A place goes forward until it has as many in
    4 micro batches   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .      flight as its limit says, then alternately
                      .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .      back and forward.
"""
import functools

LOOPS = 2                    # stages per rank with --schedule interleaved


@functools.cache
def timetable(kind: str, count: int, stages: int, places: int) -> list[list[tuple[int, int, bool]]]:
    """For each tick the work of all places: (stage, micro batch, forward?); stage s is at place s % places.

    Every work needs what an earlier tick made. A stage takes the micro batches in their order, both ways, so
    no sum depends on the schedule.
    """
    loops, done = stages // places, set()
    padded = count if loops == 1 else -(-count // places) * places  # interleaved: the added ones are left out
    turns = [(k, loop) for k in range(padded) for loop in range(loops)]
    ahead = sorted(turns, key=lambda turn: (turn[0] // places, turn[1], turn[0]))
    back = sorted(turns, key=lambda turn: (turn[0] // places, -turn[1], turn[0]))
    forwards, backwards, ticks = [0] * places, [0] * places, []
    while min(backwards) < len(turns):
        tick = []
        for place in range(places):
            limit = places - place + (loops > 1) * (loops * places - place - 1)
            room = kind == "gpipe" or forwards[place] - backwards[place] < limit
            forward = room and forwards[place] < len(turns)
            if not forward and backwards[place] == len(turns):
                continue
            k, loop = ahead[forwards[place]] if forward else back[backwards[place]]
            stage = loop * places + place
            before = stage - 1 if forward else stage + 1
            if before in (-1, stages) or (before, k, forward) in done:
                tick.append((stage, k, forward))
                forwards[place] += forward
                backwards[place] += not forward
        done.update(tick)
        ticks.append([work for work in tick if work[1] < count])
    return ticks
