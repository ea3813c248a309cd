"""The machines of the campaign: one agent as plain torchrun starts it, or up to three agents on loopback that
find each other in a store process. Knows every process it started, and signals no other.
"""

import signal
import uuid

from jobs import ROOT, children, family, until

WORKER = ROOT / "tests/chaos/worker.py"
# What torchrun's defaults make slow or fragile: 1 s instead of 30 to wait for more nodes, 5 s instead of 15
# until a dead agent counts as dead, and no restart budget that preemptions could eat up (a run without
# progress stops by itself).
CONF = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=120"
KINDS = {  # name: (what starts an agent, what it starts, agents at most, settings of their meeting)
    "plain": ("torchrun", WORKER, 1, ""),
    "store": ("torchrun", WORKER, 3, CONF),
    "launcher": (ROOT / "launch/torchrun.py", ROOT / "train_ddp.py", 4, "is_host=0"),
}


class Cluster:
    """One submission of the job: from its first agent to the last one's end."""

    def __init__(self, jobs, rng, flags, env, kind, size=None):
        self.jobs = jobs
        self.rng = rng
        self.flags = flags
        self.kind = kind
        self.program, self.script, self.most, conf = KINDS[kind]
        self.agents = []
        self.store = None
        self.signalled = []
        self.env = env
        if kind == "plain":
            self.add(size or rng.randint(1, 4))
            return
        self.store, place = jobs.store()
        # One store for all lives, which torchrun shares by default, keeps the address of a dead rank 0. As
        # variables, for ranks read them: the warm process has no flags.
        self.env = env | {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PET_NNODES": f"1:{self.most}",
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ID": uuid.uuid4().hex,
            "PET_RDZV_ENDPOINT": place,
            "PET_RDZV_CONF": conf,
            "PET_LOCAL_ADDR": "127.0.0.1",
        }
        for _ in range(rng.randint(1, self.most)):
            self.add(rng.randint(1, 2))

    def add(self, processes):
        """One more node, of so many processes."""
        agent = self.jobs.start(
            self.program,
            f"--nproc_per_node={processes}",
            "--max_restarts=1000000",
            self.script,
            *self.flags,
            **self.env,
        )
        self.agents.append(agent)

    @property
    def living(self):
        return [agent for agent in self.agents if agent.poll() is None]

    def ended(self):
        return not self.living

    def workers(self):
        return [pid for agent in self.living for pid in agent.workers]

    def someone(self):
        """An agent that has workers, and one of these; None where there is none at the moment."""
        busy = [(agent, pid) for agent in self.living for pid in agent.workers]
        return self.rng.choice(busy) if busy else None

    def loader(self):
        """(a rank, a process that fetches samples for it); None where there is none at the moment."""
        busy = [(rank, pid) for rank in self.workers() for pid in children(rank)]
        return self.rng.choice(busy) if busy else None

    def strike(self, pids, name):
        """The signal to each, all at once; how many it reached."""
        landed = 0
        for pid in pids:
            if self.jobs.kill(pid, getattr(signal, f"SIG{name}")):
                landed += 1
                self.signalled.append({"pid": pid, "signal": name})
        return landed

    def finish(self, deadline):
        """Every agent has gone by itself, and the store by our hand; the agents' exit codes."""
        until(self.ended, "the agents to end", deadline)
        self.close()
        return [agent.poll() for agent in self.agents]

    def close(self):
        if self.store:
            self.store.kill(signal.SIGTERM)
            self.store.wait()

    def await_orphans(self, deadline):
        """Until no worker of a dead agent is left."""
        kept = {agent.pid for agent in self.agents if agent.poll() is not None}
        if self.store:
            kept.add(self.store.pid)

        def gone():
            ours = {pid for agent in self.living for pid in family(agent.pid)}
            return not {*self.jobs.alive()} - ours - kept

        until(gone, "the workers of dead agents to end", deadline)
