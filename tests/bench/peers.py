"""A kill in mid-epoch, and a resize from 2 to 3 processes: what this project and its peers make of them.

    pip install accelerate torchft                             # the other peers are in torch
    python tests/bench/peers.py                                # ten minutes a round, more if it is busy
    python tests/bench/peers.py --ways torch.save,torchrun --rounds 1
    python tests/bench/peers.py --batch divided                # 64 samples a step, over all processes

Each trains one epoch of the same net on the same samples, the way its own documentation says, and writes down
the samples of each step. The peers save every 50 steps; ours saves nothing before it has to. As in their
tutorials a peer's process has 32 samples a step, however many there are. torchft has a group a process, which
goes through its own share once, and notes its place in it.

    s        from SIGKILL of one of two processes until two new steps are made (one may be under way); of a
             resize from SIGTERM of all, then a start with three (torchft: a third group joins)
    lost     steps that were made and had to be made again
    missed, repeated    samples of the epoch, in the steps that the final model is made of
"""

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from functools import partial
from itertools import islice
from pathlib import Path

from turns import ROOT, arguments  # isort: skip  (first: it finds the others)

import torch
from jobs import Jobs, free_port, until
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SAMPLES = 9600
EVERY = 50  # steps between two saves
PACE_SECONDS = 0.03  # of a step
KILLS = range(55, 95)  # steps


# ---- what a process does --------------------------------------------------------------------------
def samples():
    """The target of a sample has its number, so that every loop knows what it trains on."""
    rng = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(SAMPLES, 64, generator=rng), torch.arange(SAMPLES))


def build():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return net, torch.optim.AdamW(net.parameters(), 1e-3)


class Notes:
    """A file a process, written through to the kernel: a kill loses no line."""

    def __init__(self, run):
        self.life = os.environ.get("START", "0") + "." + os.environ["TORCHELASTIC_RESTART_COUNT"]
        self.step = 0
        self.file = open(run / f"notes-{os.getpid()}", "a", buffering=1)

    def write(self, *fields):
        self.file.write(json.dumps([self.life, *fields]) + "\n")

    def begin(self, step, ids):
        if step > self.step:
            time.sleep(PACE_SECONDS)
        self.step = step
        self.write(step, ids.tolist())


def ours(run, batch):
    from common.elastic import Elastic

    notes = Notes(run)
    net, optimizer = build()
    with Elastic(
        net=net, optimizer=optimizer, dataset=samples(), run_dir=run / "run", batch_size=64, virtual_ranks=6
    ) as training:
        for piece in training:
            step = training.progress.step + 1
            notes.begin(step, piece.y)
            training.step(cross_entropy(training.model(piece.x), piece.y % 10))
            if training.progress.step == step:
                notes.write(step)


def train(run, model, optimizer, batches, done, save, backward=torch.Tensor.backward):
    """What is left of the epoch, as tutorials write it."""
    notes = Notes(run)
    for step, (x, ids) in enumerate(batches, done + 1):
        notes.begin(step, ids)
        optimizer.zero_grad()
        backward(cross_entropy(model(x), ids % 10))
        optimizer.step()
        notes.write(step)
        if step % EVERY == 0:
            save(step)


def newest(run, name):
    """The step and the folder of the newest save that has this file."""
    folders = [path.parent for path in sorted(run.glob(f"*/{name}"))]
    return (int(folders[-1].name), folders[-1]) if folders else (0, None)


def distribute(batch):
    distributed.init_process_group("gloo")
    net, optimizer = build()
    sampler = DistributedSampler(samples())
    sampler.set_epoch(0)
    return DistributedDataParallel(net), optimizer, DataLoader(samples(), batch, sampler=sampler)


def torch_save(run, batch):
    model, optimizer, loader = distribute(batch)
    path = run / "snapshot.pt"
    done = 0
    if path.exists():
        snapshot = torch.load(path)
        model.module.load_state_dict(snapshot["net"])
        optimizer.load_state_dict(snapshot["optimizer"])
        done = snapshot["step"]

    def save(step):
        if distributed.get_rank() == 0:
            net = model.module.state_dict()
            torch.save({"net": net, "optimizer": optimizer.state_dict(), "step": step}, path)

    train(run, model, optimizer, islice(loader, done, None), done, save)


def dcp(run, batch):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer, loader = distribute(batch)
    done, folder = newest(run, ".metadata")
    if folder:
        net, moments = get_state_dict(model, optimizer)
        checkpoint.load({"net": net, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=net, optim_state_dict=moments)

    def save(step):
        net, moments = get_state_dict(model, optimizer)
        checkpoint.save({"net": net, "optimizer": moments}, checkpoint_id=run / f"{step:06}")

    train(run, model, optimizer, islice(loader, done, None), done, save)


def accelerate(run, batch):
    from accelerate import Accelerator, utils

    utils.set_seed(0)
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*build(), DataLoader(samples(), batch, shuffle=True))
    done, folder = newest(run, "random_states_0.pkl")
    if folder:
        accelerator.load_state(folder)
    loader.set_epoch(0)
    batches = accelerator.skip_first_batches(loader, done)

    def save(step):
        accelerator.save_state(run / f"{step:06}")

    train(run, model, optimizer, batches, done, save, accelerator.backward)


def torchft(run, batch):
    import torchft as ft

    group = int(os.environ["REPLICA_GROUP_ID"])
    notes = Notes(run)
    notes.life = "one"  # of all groups
    net, optimizer = build()
    manager = ft.Manager(
        pg=ft.ProcessGroupGloo(),
        min_replica_size=1,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
        load_state_dict=lambda state: (
            net.load_state_dict(state["net"]),
            optimizer.load_state_dict(state["optimizer"]),
        ),
        replica_id=f"peer_{group}",
    )
    model = ft.DistributedDataParallel(manager, net)
    steps = ft.Optimizer(manager, optimizer)
    groups = int(os.environ["NUM_REPLICA_GROUPS"])
    sampler = ft.DistributedSampler(
        samples(), replica_rank=group, num_replica_groups=groups, group_rank=0, num_replicas=1
    )
    loader = DataLoader(samples(), batch, sampler=sampler)
    place = run / f"place-{group}"
    done = int(place.read_text()) if place.exists() else 0
    for index, (x, ids) in enumerate(islice(loader, done, None), done + 1):
        time.sleep(PACE_SECONDS)
        steps.zero_grad()
        cross_entropy(model(x), ids % 10).backward()
        before = manager.current_step()
        steps.step()
        if manager.current_step() > before and manager.is_participating():
            notes.write(manager.current_step(), ids.tolist())
            notes.write(manager.current_step())
        place.write_text(str(index))
    manager.shutdown(wait=False)


# ---- the bench ------------------------------------------------------------------------------------
WAYS = {
    "torch.save": torch_save,
    "launch/torchrun.py": ours,
    "torchrun": ours,
    "dcp": dcp,
    "accelerate": accelerate,
    "torchft": torchft,
}
LIGHTHOUSE = "--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=10000", "--bind"


def notes_of(run):
    """{life: [(step,) of each step that was made, (step, ids) of each that began]}"""
    lives = defaultdict(list)
    for path in run.glob("notes-*"):
        for line in path.read_text().splitlines():
            life, *fields = json.loads(line)
            lives[life].append(fields)
    return dict(sorted(lives.items()))


def last_step(run):
    return max((step for lines in notes_of(run).values() for step, *ids in lines if not ids), default=0)


def count(run):
    """Steps made again; samples missed and repeated in the steps that the last life builds on."""
    kept = {}
    lost = 0
    for lines in notes_of(run).values():
        first = min(step for step, *_ in lines)
        lost += sum(step >= first for step in kept)
        kept = {step: ids for step, ids in kept.items() if step < first}
        kept |= {step: [] for step, *ids in lines if not ids}
        for step, *ids in lines:
            if step in kept:  # else it was not made
                kept[step] += sum(ids, [])
    used = Counter(sum(kept.values(), []))
    return lost, SAMPLES - len(used), used.total() - len(used)


def start(jobs, name, words, size, **env):
    # with one store for all restarts a process may find the address of a dead one
    launcher = [ROOT / name] if name.startswith("launch") else ["torchrun", "--standalone"]
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    options = [f"--nproc_per_node={size}", "--max_restarts=3"]
    return jobs.start(*launcher, *options, __file__, "--train", name, *words, cold=True, **env)


def turn(jobs, name, event, batch, rng):
    """Seconds, then what `count` finds, of a training of its own."""
    run = Path(tempfile.mkdtemp(dir=jobs.folder))
    launch = partial(start, jobs, name, ["--into", run, "--batch", batch])
    grows = event == "resize"
    if name == "torchft":
        place = f"localhost:{free_port()}"
        program = Path(sys.executable).with_name("torchft_lighthouse")
        lighthouse = jobs.start(*LIGHTHOUSE, place, cold=True, program=program)
        env = {"TORCHFT_LIGHTHOUSE": f"http://{place}", "NUM_REPLICA_GROUPS": str(2 + grows)}
        groups = (launch(1, REPLICA_GROUP_ID=str(group), **env) for group in range(3))
        agents = [next(groups), next(groups)]
    else:
        agents = [launch(2)]

    def reach(step):
        until(lambda: last_step(run) >= step or any(one.poll() for one in agents), f"{name} at {step}")

    reach(rng.choice(KILLS))
    pids = sorted(int(path.name.split("-")[1]) for path in run.glob("notes-*"))
    began = time.time()
    if event == "kill":
        jobs.kill(rng.choice(pids))
    elif grows and name == "torchft":
        agents.append(next(groups))
    elif grows:
        agents[0].kill(signal.SIGTERM)
        agents[0].wait()
        agents = [launch(3, START="1")]
    reach(last_step(run) + 2)  # the next one may have been under way
    seconds = time.time() - began
    for agent in agents:
        agent.ends_with(0)
    if name == "torchft":
        lighthouse.kill()
    return seconds, *count(run)


def main():
    args = arguments(__doc__, ways=",".join(WAYS), rounds=3, batch="process", train="", into="")
    if args.train:
        batch = 32 if args.batch == "process" else 64 // int(os.environ["WORLD_SIZE"])
        return WAYS[args.train](Path(args.into), batch)
    costs = defaultdict(list)
    names = args.ways.split(",")
    with tempfile.TemporaryDirectory(prefix="peers-bench-") as folder, Jobs(folder) as jobs:
        for number in range(args.rounds):
            for name in names[:: 1 - 2 * (number % 2)]:  # none is always the first
                for event in ("kill", "resize"):
                    costs[event, name].append(turn(jobs, name, event, args.batch, random.Random(number)))
    print("event   way                      s  x the first   lost  missed  repeated")
    for (event, name), found in sorted(costs.items()):
        seconds, *counts = map(statistics.median, zip(*found, strict=True))
        base = statistics.median(cost[0] for cost in costs[event, names[0]])
        print(f"{event:7} {name:18} {seconds:7.2f} {seconds / base:12.2f}", *(f"{n:8.0f}" for n in counts))


if __name__ == "__main__":
    main()
