"""launch/meeting.py, in this process."""
import sys
from types import SimpleNamespace

import pytest
from jobs import ROOT
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent


@pytest.fixture
def meeting(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "launch"))
    import meeting
    yield meeting
    del sys.modules["meeting"]


@pytest.mark.parametrize("ended", [1, 2])
def test_a_machine_that_comes_as_all_have_ended_comes_too_late(meeting, monkeypatch, ended):
    """The others may have left already: who then met again would find the job closed."""
    again = []
    monkeypatch.setattr(LocalElasticAgent, "_restart_workers", lambda self, group: again.append(group))
    agent, group = object.__new__(meeting.Agent), SimpleNamespace(store=HashStore(), group_world_size=2)
    agent.ended = True
    group.store.add("ended", ended)
    agent._restart_workers(group)
    assert bool(again) == (ended == 1)
    assert group.store.check(["all ended"]) == (ended == 2)
