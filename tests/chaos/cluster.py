"""The machines of the campaign: one agent as plain torchrun starts it, or up to three agents on loopback that
find each other in a store process or in a file. Knows every process it started, and signals no other.
"""
import os
import signal
import time
import uuid

from jobs import ROOT, children, loaders, until

WORKER = ROOT / "tests" / "chaos" / "worker.py"
NODES = 3
# What torchrun's defaults make slow or fragile: 2 s instead of 30 to wait for more nodes, 5 s instead of 15
# until a dead agent counts as dead, and no restart budget that preemptions could eat up (a run without
# progress stops by itself).
CONF = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=120"


class Cluster:
    """One submission of the job: from its first agent to the last one's end."""

    def __init__(self, jobs, rng, flags, views, env, cold=False, kind=None, size=None):
        """`views`: the run folder as each machine sees it; the agents take one in turn."""
        self.jobs, self.rng, self.flags, self.cold = jobs, rng, flags, cold
        self.kind = kind or rng.choices(["plain", "store", "file"], [6, 3, 2])[0]
        self.agents, self.store, self.signalled, self.cut = [], None, [], False
        self.id, self.env, self.views = uuid.uuid4().hex, dict(env), views
        self.first = rng.randrange(len(views)) if len(views) > 1 else 0
        self.multiple = 2 if env.get("CHAOS_SCRIPT") == "mp" else 1     # a process for each stage
        if self.kind == "plain":
            self.add(size or rng.randint(1, 4))
            return
        # One store for all lives, which torchrun shares by default, keeps the address of a dead rank 0.
        self.env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.endpoint, self.conf = str(jobs.folder / f"rendezvous-{self.id}"), f"store_type=file,{CONF}"
        if self.kind == "store":
            self.store = jobs.start(ROOT / "launch" / "store.py", "127.0.0.1:0")
            until(lambda: "store on" in self.store.output, "the store")
            self.endpoint, self.conf = self.store.output.split("store on ")[1].strip(), f"is_host=0,{CONF}"
        for _ in range(rng.randint(1, NODES)):
            self.add(rng.randint(1, 2))

    def add(self, processes):
        """One more node, of so many processes."""
        processes += processes % self.multiple
        flags, meet = [f"--nproc_per_node={processes}", "--max_restarts=1000000"], {}
        if self.kind != "plain":  # as variables, for ranks read them: the warm process has no flags
            meet = {"PET_NNODES": f"1:{NODES}", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ID": self.id,
                    "PET_RDZV_ENDPOINT": self.endpoint, "PET_RDZV_CONF": self.conf,
                    "PET_LOCAL_ADDR": "127.0.0.1"}
        machine = (self.first + len(self.agents)) % len(self.views)
        training = [f"--run-dir={self.views[machine]}", *self.flags[1:]]
        agent = self.jobs.start("torchrun", *flags, WORKER, *training, cold=self.cold,
                                **self.env, **meet, CHAOS_MACHINE=str(machine))
        agent.processes = processes
        self.agents.append(agent)
        return agent

    @property
    def living(self):
        return [agent for agent in self.agents if agent.poll() is None]

    def ended(self):
        return not self.living

    def workers(self):
        return [pid for agent in self.living for pid in agent.workers]

    def someone(self):
        """An agent that has workers, and one of these; None where there is none at the moment."""
        busy = [(agent, pids) for agent in self.living if (pids := agent.workers)]
        if not busy:
            return None
        agent, pids = self.rng.choice(busy)
        return agent, self.rng.choice(pids)

    def loader(self):
        """(a rank, a process that fetches samples for it); None where there is none at the moment."""
        busy = [(rank, pid) for rank in self.workers() for pid in loaders(rank)]
        return self.rng.choice(busy) if busy else None

    def strike(self, pids, name):
        """The signal to each, all at once; how many it reached."""
        number, landed = getattr(signal, f"SIG{name}"), 0
        for pid in pids:
            if self.jobs.kill(pid, number):
                landed += 1
                self.signalled.append({"t": time.time(), "pid": pid, "signal": name})
        return landed

    def finish(self, deadline):
        """Every agent has gone by itself, and the store by our hand; the agents' exit codes."""
        until(self.ended, "the agents to end", deadline)
        self.close()
        return [agent.poll() for agent in self.agents]

    def close(self):
        if self.store:
            self.store.kill(signal.SIGTERM)
            self.store.wait(10)
        if os.path.exists(getattr(self, "endpoint", "")):
            os.unlink(self.endpoint)

    def orphans(self, deadline):
        """Seconds until no worker of a dead agent is left."""
        began, dead = time.monotonic(), {agent.pid for agent in self.agents if agent.poll() is not None}
        kept = {self.store.pid} if self.store else set()

        def gone():
            ours = {pid for agent in self.living for pid in [agent.pid, *_tree(agent.pid)]} | kept | dead
            return not [pid for pid in self.jobs.alive() if pid not in ours]
        until(gone, "the workers of dead agents to end", deadline)
        return time.monotonic() - began


def _tree(pid):
    return [p for child in children(pid) for p in [child, *_tree(child)]]
