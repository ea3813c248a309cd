"""What 16 to 1,024 ranks ask of the store at a start, counted: it grows with their number, not its square."""
import threading
from concurrent.futures import ThreadPoolExecutor

from common.world import rendezvous


class Store:
    """A key-value store in this process that counts requests."""

    port = 7

    def __init__(self):
        self.values, self.changed, self.requests = {}, threading.Condition(), 0

    def set(self, key, value):
        with self.changed:
            self.requests += 1
            self.values[key] = value
            self.changed.notify_all()

    def add(self, key, number):
        with self.changed:
            self.requests += 1
            self.values[key] = self.values.get(key, 0) + number
            return self.values[key]

    def check(self, keys):
        with self.changed:
            self.requests += 1
            return set(keys) <= self.values.keys()

    def multi_get(self, keys):
        with self.changed:
            self.requests += 1
            assert self.changed.wait_for(lambda: set(keys) <= self.values.keys(), 60)
            return [self.values[key].encode() for key in keys]

    def get(self, key):
        return self.multi_get([key])[0]


def start(size, monkeypatch):
    """Requests of one start; the agent's store still has the words of a life before."""
    agent, life = Store(), Store()
    agent.values = {f"hello/{rank}": f"{rank:032}" for rank in range(1, size)}
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(rendezvous.dist, "PrefixStore", lambda prefix, store: store)
    monkeypatch.setattr(rendezvous, "_find_store", lambda host, port: life if port == life.port else agent)
    monkeypatch.setattr(rendezvous, "_open_store", lambda host, port: life)
    with ThreadPoolExecutor(size) as pool:
        assert set(pool.map(lambda rank: rendezvous.fresh_store(rank, size), range(size))) == {life}
    return agent.requests + life.requests


def test_what_the_ranks_ask_at_a_start_grows_with_their_number_and_not_with_its_square(monkeypatch):
    requests = {size: start(size, monkeypatch) for size in (16, 64, 256, 1024)}
    assert requests[1024] < 1.5 * 1024 / 16 * requests[16], requests
