"""Who died in a life, of what."""

from common.ledger import Life, Record, named


def deaths_of(events: Life, over: bool) -> list[Record]:
    """Return a dict per process that died: life, rank, host, pid, cause.

    A process has died if it was killed, if it noted an error, or if its life is over and it has not noted
    that it left.
    """
    life = events[0]
    left = {event["rank"] for event in named(events, "left")}
    causes = {}
    for note in named(events, "error", "death"):
        if note["event"] == "error" or note["rank"] not in left:
            causes.setdefault(note["rank"], note["why"])
    ended = over and not named(events, "done")
    deaths = []
    for rank, (host, pid) in enumerate(zip(life.get("hosts", ()), life.get("pids", ()), strict=False)):
        cause = causes.get(rank)
        if ended and rank not in left:
            cause = cause or "ended without a word (killed, or its machine is gone)"
        if cause:
            deaths.append({"life": life["life"], "rank": rank, "host": host, "pid": pid, "cause": cause})
    return deaths
