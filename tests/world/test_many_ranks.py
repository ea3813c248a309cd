"""What 16 to 1,024 ranks ask of the store at a start, counted: it grows with their number, not its square."""

import itertools
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import HashStore

from common.world import rendezvous


class Counted:
    """A store in this process, whose requests are counted."""

    port = 7

    def __init__(self):
        self.store = HashStore()
        self.requests = itertools.count()

    def __getattr__(self, name):
        next(self.requests)
        return getattr(self.store, name)


def start(size, monkeypatch):
    """Requests of one start."""
    agent, life = Counted(), Counted()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(rendezvous.dist, "PrefixStore", lambda prefix, store: store)
    monkeypatch.setattr(rendezvous, "_find_store", lambda host, port: life if port() == life.port else agent)
    monkeypatch.setattr(rendezvous, "_open_store", lambda host, port: life)
    with ThreadPoolExecutor(size) as pool:
        assert set(pool.map(lambda rank: rendezvous.fresh_store(rank, size), range(size))) == {life}
    return next(agent.requests) + next(life.requests)


def test_what_the_ranks_ask_at_a_start_grows_with_their_number_and_not_with_its_square(monkeypatch):
    requests = {size: start(size, monkeypatch) for size in (16, 64, 256, 1024)}
    assert requests[1024] < 1.5 * 1024 / 16 * requests[16], requests
