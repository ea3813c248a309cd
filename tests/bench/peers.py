"""A kill in mid-epoch, and a resize from 2 to 3 processes: what this project and its peers make of them.

    python tests/bench/peers.py                                # about a minute a peer and round
    python tests/bench/peers.py --ways ours,dcp --rounds 1     # others: accelerate, torchft, lightning (pip)

Each trains one epoch of the same small net on the same samples, the way its own documentation says, writes
down the samples of every step, and saves every 50 steps if it saves by itself; ours saves nothing until then.
Fixed is the batch of a process (32), as tutorials have it, or with `--batch divided` the global one (64).

    s        from SIGKILL of one of two processes to the next step that was not made before; of a resize from
             SIGTERM of all and a start with three (torchft: a third group joins, and nothing is stopped)
    lost     steps that were made and had to be made again
    missed, repeated    samples of the epoch in the steps that the final model is made of
    bits     whether the final weights are those of the same epoch undisturbed with two processes

torchft: a group of its own for each process, each trains its share once, and notes its place in it each step.
"""

import hashlib
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

from turns import ROOT, arguments, ratio  # isort: skip  (first: it finds the others)

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
        self.run = run
        self.life = os.environ.get("START", "0") + "." + os.environ["TORCHELASTIC_RESTART_COUNT"]
        self.step = 0
        self.file = open(run / f"notes-{os.getpid()}", "a", buffering=1)

    def write(self, *fields):
        self.file.write(json.dumps([self.life, time.time(), *fields]) + "\n")

    def begin(self, step, ids):
        if step > self.step:
            time.sleep(PACE_SECONDS)
        self.step = step
        self.write(step, ids.tolist())

    def end(self, net):
        weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
        (self.run / "digest").write_text(hashlib.sha256(weights).hexdigest())


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
    notes.end(net)


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
    notes.end(model)


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
    saves = []

    def save(step):
        if saves:
            saves.pop().result()
        net, moments = get_state_dict(model, optimizer)
        state = {"net": net, "optimizer": moments}
        saves.append(checkpoint.async_save(state, checkpoint_id=run / f"{step:06}"))

    train(run, model, optimizer, islice(loader, done, None), done, save)
    saves.pop().result()


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
    notes.end(net)
    manager.shutdown(wait=False)


def lightning(run, batch):
    import lightning as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    notes = Notes(run)
    net, optimizer = build()

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def configure_optimizers(self):
            return optimizer

        def training_step(self, batch, index):
            x, ids = batch
            notes.begin(self.global_step + 1, ids)
            return cross_entropy(self.net(x), ids % 10)

        def on_train_batch_end(self, *_):
            notes.write(self.global_step)

    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        logger=False,
        callbacks=[ModelCheckpoint(run, every_n_train_steps=EVERY, save_last=True)],
    )
    loader = DataLoader(samples(), batch, shuffle=True)
    pl.seed_everything(0)
    trainer.fit(Module(), loader, ckpt_path="last")
    notes.end(net)


# ---- the bench ------------------------------------------------------------------------------------
WAYS = {
    "launch/torchrun.py": ours,
    "torchrun": ours,
    "torch.save": torch_save,
    "dcp": dcp,
    "accelerate": accelerate,
    "lightning": lightning,
    "torchft": torchft,
}


EVENTS = ["kill", "resize"]
LIGHTHOUSE = "--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=10000", "--bind"


def read(run):
    """{life: [(time, step) of a step that was made, (time, step, ids) of one that began]}"""
    lives = defaultdict(list)
    for path in run.glob("notes-*"):
        for line in path.read_text().splitlines():
            life, *fields = json.loads(line)
            lives[life].append(fields)
    return dict(sorted(lives.items()))


def last_step(run):
    return max((step for lines in read(run).values() for _, step, *ids in lines if not ids), default=0)


def count(run):
    """Steps made again; samples missed and repeated in the steps that the last life builds on."""
    kept = {}
    lost = 0
    for lines in read(run).values():
        first = min(step for _, step, *_ in lines)
        lost += sum(step >= first for step in kept)
        done = {step for _, step, *ids in lines if not ids}
        kept = {step: ids for step, ids in kept.items() if step < first} | {step: [] for step in done}
        for _, step, *ids in lines:
            if step in done:
                kept[step] += sum(ids, [])
    used = Counter(sum(kept.values(), []))
    return lost, SAMPLES - len(used), used.total() - len(used)


def start(jobs, name, words, size, **env):
    launcher = ROOT / name if name.startswith("launch") else "torchrun"
    env |= {"PET_MASTER_PORT": str(free_port()), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    options = [f"--nproc_per_node={size}", "--max_restarts=3"]
    return jobs.start(launcher, *options, __file__, "--train", name, *words, cold=True, **env)


def turn(jobs, name, event, batch, rng):
    """(seconds, *count, digest of the weights) of a training of its own."""
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
        ended = lambda: any(agent.poll() for agent in agents)
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
    return seconds, *count(run), (run / "digest").read_text()


def main():
    args = arguments(__doc__, ways=",".join(WAYS), rounds=3, batch="process", train="", into="")
    if args.train:
        batch = 32 if args.batch == "process" else 64 // int(os.environ["WORLD_SIZE"])
        return WAYS[args.train](Path(args.into), batch)
    costs = defaultdict(list)
    names = args.ways.split(",")
    with tempfile.TemporaryDirectory(prefix="peers-bench-") as folder, Jobs(folder) as jobs:
        for number in range(args.rounds + 1):
            for name in names[:: 1 - 2 * (number % 2)]:  # none is always the first
                for event in EVENTS if number else ["nothing"]:
                    cost = turn(jobs, name, event, args.batch, random.Random(number))
                    costs[name, event].append(cost)
    for event in EVENTS:
        for name in names:
            seconds, *counts, digests = zip(*costs[name, event], strict=True)
            theirs = [cost[0] for cost in costs[names[0], event]]
            lost, missed, repeated = map(statistics.median, counts)
            same = {*digests} == {costs[name, "nothing"][0][-1]}
            print(
                f"{event:7} {name:18} {statistics.median(seconds):5.2f} s, {ratio(seconds, theirs)} {names[0]}; "
                f"lost {lost:g}, missed {missed:g}, repeated {repeated:g}, same bits {same}",
                flush=True,
            )


if __name__ == "__main__":
    main()
