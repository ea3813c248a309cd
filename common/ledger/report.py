"""The reports of a run in words: where its time went, who died, and how each host did. No torch here."""
from collections import Counter
from statistics import median

FACTS = ("world", "stages", "n", "data", "order")   # of a life, that may change


def report(facts):
    """Yield the lines of the goodput report, from what `summarize` returned."""
    events, goodput, before = facts["events"], facts["goodput"], None
    yield f"lives {events['life']}, last saved step {facts['step']}"
    for life in facts["lives"]:
        if life["gap"]:
            how = "restart" if life["again"] else "started again after"
            yield f"  {how} {sum(life['gap'].values()):.2f} s: {_spell(life['gap'])}"
        own = {name: value for name, value in life["buckets"].items() if name not in life["gap"]}
        yield (f"  life {life['life']}  world {life['world']}  restart {life.get('restart', '?')}  "
               f"resumed at step {life['step']}, saved up to {life['saved']}  {_spell(own)}".rstrip())
        if before and (changed := "; ".join(_changes(before, life))):
            yield f"    changed: {changed}"
        before = life
        dead = [death for death in facts["deaths"] if death["life"] == life["life"]]
        yield from (f"    {death_in_words(death)}" for death in dead)
    whole = [sum(life["gap"].values()) for life in facts["lives"] if life["again"]]
    yield (f"saves {events.get('save', 0)}, rescues {events.get('rescue', 0)}, restarts {len(whole)}"
           + (f" (median {median(whole):.2f} s)" if whole else ""))
    yield f"wall {facts['wall_s']:.1f} s: {_spell(facts['buckets']) or 'no times were recorded'}"
    goodput = "unknown" if goodput is None else f"{goodput:.1%}"
    yield f"goodput {goodput} (time in steps that are in the final model / wall)"


def by_host(facts):
    """Yield a line per host: processes, deaths, hangs and slow spells, so that a bad machine shows."""
    hosts, sick = Counter(), {name: Counter() for name in ("death", "hang", "straggler")}
    for life in facts["lives"]:
        names = life.get("hosts", ["?"] * life["world"])
        hosts.update(names)
        for kind in ("hang", "straggler"):
            sick[kind].update(names[rank] for rank in life[kind] if 0 <= rank < len(names))
    sick["death"].update(death["host"] or "?" for death in facts["deaths"])
    for host in sorted(hosts, key=lambda name: (-sum(count[name] for count in sick.values()), name)):
        yield (f"{host}: {hosts[host]} processes in {len(facts['lives'])} lives, "
               f"deaths {sick['death'][host]}, hangs {sick['hang'][host]}, "
               f"straggler {sick['straggler'][host]} times")


def death_in_words(death):
    where = f" on {death['host']}" if death["host"] else ""
    return f"rank {death['rank']} (pid {death['pid'] or '?'}{where}) {death['cause']}"


def _changes(before, life):
    """What differs between two lives: flags, processes, hosts, data."""
    old, new = ({name: told.get(name) for name in FACTS} | told.get("options", {})
                | {"hosts": " ".join(sorted(set(told.get("hosts", []))))} for told in (before, life))
    return [f"{name} {old.get(name, 'default')} → {new.get(name, 'default')}" for name in {**old, **new}
            if old.get(name) != new.get(name)]


def _spell(seconds):
    return ", ".join(f"{name.replace('_', ' ')} {value:.2f} s" for name, value in seconds.items() if value)
