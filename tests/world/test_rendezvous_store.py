"""launch/store.py: the one process that a job on several machines cannot do without."""

import re
import signal
import socket
import sys
from pathlib import Path

import pytest
from jobs import ROOT, listening, until

from launch import store as launcher

STORE = ROOT / "launch" / "store.py"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_listens_on_the_address_it_was_given_and_on_no_other_until_a_signal_ends_it_with_0(jobs, number):
    store, _ = jobs.store()
    assert listening(store.pid) == {"0100007F"}
    store.kill(number)
    store.ends_with(0)


def test_nohup_protects_it(jobs):
    store = jobs.start(sys.executable, STORE, "127.0.0.1:0", cold=True, program="nohup")
    until(lambda: "store on" in store.output, "the store")
    store.kill(signal.SIGHUP)
    status = Path(f"/proc/{store.pid}/status")
    with pytest.raises(AssertionError):  # while it waits for signals it blocks none
        until(lambda: not re.search("SigBlk:\t0+\n", status.read_text()), "its end", deadline=1)
    store.kill(signal.SIGTERM)
    store.ends_with(0)


def test_what_is_no_address_of_ours_is_refused_in_two_lines(jobs):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for address, word in (
            (f"127.0.0.1:{taken.getsockname()[1]}", "in use"),
            ("192.0.2.1:0", "assign"),
            ("127.0.0.1", "usage"),
        ):
            said = jobs.start(STORE, address).ends_with(2)
            assert word in said and len(said.splitlines()) <= 2, said


def test_a_name_that_only_this_machine_can_reach_is_refused(monkeypatch, capsys):
    """Debian calls a machine 127.0.1.1 in its own /etc/hosts: it would say `store on node01`, and nobody
    could come.
    """
    found = [(socket.AF_INET, 0, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert launcher.main(["node01:29400"]) == 2
    assert "node01 is 127.0.1.1 on this machine" in capsys.readouterr().err
