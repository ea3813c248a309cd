"""launch/ssh.sh with an `ssh` on the PATH that runs the command here."""

import json
import os
import signal
import sys

import pytest
from jobs import ROOT, executable, until

SSH = ROOT / "launch/ssh.sh"
# Takes what launch/ssh.sh passes; the machine `gone` cannot be reached.
FAKE_SSH = """#!/usr/bin/env bash
[ "$1 $2 $5 $6 $7" = "-o BatchMode=yes -o ServerAliveInterval=5 --" ] || exit 99
[ "$8" != gone ] || { echo "ssh: connect to host gone: No route to host" >&2; exit 255; }
exec setsid bash -c "$9"
"""
# In the place of Python: notes what it was given and its end; a store that lives, agents that end with $CODE.
FAKE_PYTHON = f"""#!{sys.executable}
import json, os, signal, sys, time
def note(*words):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps(words) + "\\n")
def leave(*_):
    note("left", sys.argv[1])
    sys.exit(0 if "store" in sys.argv[1] else 143)
signal.signal(signal.SIGTERM, leave)
note(os.getcwd(), *sys.argv[1:])
if "store" in sys.argv[1]:
    print("store on", sys.argv[2], flush=True)
    if os.environ.get("STORE") == "dies" and not os.path.exists(os.environ["NOTES"] + "-died"):
        open(os.environ["NOTES"] + "-died", "w")
        sys.exit(1)
elif "CODE" in os.environ:
    sys.exit(int(os.environ["CODE"]))
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def ssh(jobs, tmp_path):
    """Starts launch/ssh.sh in a session of its own, as from a terminal; `notes` are those of its Pythons."""
    for name, text in (("ssh", FAKE_SSH), ("python", FAKE_PYTHON)):
        executable(tmp_path / name, text)
    notes = tmp_path / "notes"
    notes.touch()
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": f"{tmp_path}/python",
        "NOTES": str(notes),
        "TMPDIR": str(tmp_path),
    }

    def begin(*words, program=SSH, **more):
        return jobs.start(*words, cold=True, program=program, **env, **more)

    begin.notes = lambda: [json.loads(line) for line in notes.read_text().splitlines()]
    return begin


STORE_LEFT = ["left", "launch/store.py"]


def test_a_store_and_an_agent_on_each_machine_get_every_word_as_it_was_typed(ssh):
    job = ssh("a@one,two,three", "--run-dir", "$(touch x) 'b'  c", NPROC="8", MIN="2", PORT="777", CODE="0")
    job.ends_with(0)
    until(lambda: STORE_LEFT in ssh.notes(), "the store's end")
    store, *agents = [note for note in ssh.notes() if note[0] != "left"]
    assert store == [str(ROOT), "launch/store.py", "one:777"]
    assert len(agents) == 3 and agents[0] == agents[1] == agents[2]
    assert agents[0][:4] == [str(ROOT), "launch/torchrun.py", "--nnodes=2:3", "--nproc_per_node=8"]
    assert {"--rdzv_endpoint=one:777", "--rdzv_conf=is_host=0"} < {*agents[0]}
    assert agents[0][-3:] == ["train_ddp.py", "--run-dir", "$(touch x) 'b'  c"]


def test_a_store_that_dies_is_started_again_and_a_full_log_stops_nothing(ssh):
    job = ssh("-c", 'exec "$@" > /dev/full 2>&1', "sh", SSH, "one,two", program="sh", STORE="dies")
    until(
        lambda: str(ssh.notes()).count("store.py") == 2 and len(ssh.notes()) == 4, "agents and second store"
    )
    job.kill(signal.SIGTERM)
    job.ends_with(143)
    until(lambda: len(ssh.notes()) == 7, "everybody's end")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ctrl_c_asks_all_agents_to_leave_and_the_store_is_the_last(ssh, number):
    job = ssh("one,two")
    until(lambda: "store on" in job.output and len(ssh.notes()) == 3, "the agents")
    (os.killpg if number == signal.SIGINT else os.kill)(job.pid, number)
    job.ends_with(-9 if number == signal.SIGKILL else 143)
    until(lambda: len(ssh.notes()) == 6, "everybody's end")
    assert number == signal.SIGKILL or ssh.notes()[-1] == STORE_LEFT


@pytest.mark.parametrize(
    "hosts, code, result",
    [
        ("one,gone", 0, 0),
        ("gone,one", 0, 2),
        ("one,gone", 5, 5),
        ("one", 0, 2),
        ("", 0, 2),
        ("1,2,3,4,5,6,7,8,9", 0, 2),
    ],
)
def test_a_machine_that_is_not_reached_is_done_without_unless_the_others_meet_there(ssh, hosts, code, result):
    ssh(hosts, CODE=str(code)).ends_with(result)
