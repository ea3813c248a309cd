"""What 16 to 1,024 ranks ask of the store, counted: it grows with their number, not with its square."""
import threading

from common.world import rendezvous


class Store:
    """A key-value store in this process that counts requests and bytes."""

    def __init__(self):
        self.told, self.changed, self.requests, self.bytes, self.port = {}, threading.Condition(), 0, 0, 7

    def _count(self, *texts):
        self.requests, self.bytes = self.requests + 1, self.bytes + sum(map(len, texts))

    def set(self, key, value):
        with self.changed:
            self._count(key, value)
            self.told[key] = value.encode() if isinstance(value, str) else value
            self.changed.notify_all()

    def add(self, key, number):
        with self.changed:
            self._count(key)
            self.told[key] = self.told.get(key, 0) + number
            return self.told[key]

    def get(self, key):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.told, 60)
            self._count(key, self.told[key])
            return self.told[key]

    def check(self, keys):
        with self.changed:
            self._count(*keys)
            return set(keys) <= self.told.keys()

    def multi_get(self, keys):
        with self.changed:
            found = [self.told[key] for key in keys]
            self._count(*keys, *found)
            return found


def start(size, monkeypatch):
    """Requests of one start; an agent's store that still has the words of a life before."""
    agent, life = Store(), Store()
    for rank in range(1, size):
        agent.set(f"hello/{rank}", f"{rank:032}")
    agent.requests = agent.bytes = 0
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(rendezvous.dist, "PrefixStore", lambda prefix, store: store)
    monkeypatch.setattr(rendezvous, "_find_store", lambda host, port: life if port == life.port else agent)
    monkeypatch.setattr(rendezvous, "_open_store", lambda host, port: life)
    met = []
    ranks = [threading.Thread(target=lambda r=rank: met.append(rendezvous.fresh_store(r, size)), daemon=True)
             for rank in range(size)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    assert met == [life] * size
    return agent.requests + life.requests


def test_what_the_ranks_ask_at_a_start_grows_with_their_number_and_not_with_its_square(monkeypatch):
    requests = {size: start(size, monkeypatch) for size in (16, 64, 256, 1024)}
    assert requests[1024] < 1.5 * 1024 / 16 * requests[16], requests
