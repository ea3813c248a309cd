"""A kill in mid-epoch, and a resize from 2 to 3 processes: what this project and its peers make of them.

    pip install accelerate lightning torchft                   # the other peers are in torch
    python tests/bench/peers.py                                # about half an hour
    python tests/bench/peers.py --ways torch.save,torchrun --rounds 1

Each trains one epoch of the same net on the same samples, the way its own documentation says, and writes down
the samples of each step. The peers save every 50 steps; ours saves nothing before it has to. As in their
tutorials a peer's process has 32 samples a step, however many there are. torchft has a group a process, which
goes through its own share once, and notes its place in it. Of each column the rounds, whose kills differ:

    seconds  from SIGKILL of one of two processes until two new steps are made (one may be under way); of a
             resize from SIGTERM of all, then a start with three (torchft: a third group joins)
    lost     steps that were made and had to be made again
    missed, repeated    samples of the epoch, in the steps that the final model is made of
    bits     whether that model is the one of the undisturbed run, bit for bit
"""

import hashlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path

from turns import ROOT, arguments  # isort: skip  (first: it finds the others)

import torch
from jobs import Jobs, free_port, until
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SAMPLES = 9600
BATCH = 32  # of a process
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


def criterion(outputs, ids):
    return nn.functional.cross_entropy(outputs, ids % 10)


class Notes:
    """A file a process, written through to the kernel: a kill loses no line."""

    def __init__(self, run, life=None):
        self.life = life or os.environ.get("START", "0") + "." + os.environ["TORCHELASTIC_RESTART_COUNT"]
        self.file = open(run / f"notes-{os.getpid()}", "a", buffering=1)

    def began(self, step, ids):
        self.file.write(json.dumps([self.life, step, ids.tolist()]) + "\n")

    def made(self, step):
        self.file.write(json.dumps([self.life, step]) + "\n")
        time.sleep(PACE_SECONDS)


def ours(run):
    from common.elastic import Elastic

    notes = Notes(run)
    net, optimizer = build()
    how = {"run_dir": run / "run", "batch_size": 2 * BATCH, "virtual_ranks": 6}
    with Elastic(net=net, optimizer=optimizer, dataset=samples(), **how) as training:
        for batch in training:
            notes.began(training.progress.step + 1, batch.y)
            training.step(criterion(training.model(batch.x), batch.y))
            if training.stepped:
                notes.made(training.progress.step)
    return net


def train(run, model, optimizer, batches, done, save, backward=torch.Tensor.backward):
    """What is left of the epoch, as tutorials write it."""
    notes = Notes(run)
    for step, (x, ids) in enumerate(batches, done + 1):
        notes.began(step, ids)
        optimizer.zero_grad()
        backward(criterion(model(x), ids))
        optimizer.step()
        notes.made(step)
        if step % EVERY == 0:
            save(step)
    return model


def newest(run, name):
    """The step and the folder of the newest save that has this file."""
    folders = [path.parent for path in sorted(run.glob(f"*/{name}"))]
    return (int(folders[-1].name), folders[-1]) if folders else (0, None)


def distribute():
    distributed.init_process_group("gloo")
    net, optimizer = build()
    sampler = DistributedSampler(samples())
    sampler.set_epoch(0)
    return DistributedDataParallel(net), optimizer, DataLoader(samples(), BATCH, sampler=sampler)


def torch_save(run):
    model, optimizer, loader = distribute()
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

    return train(run, model, optimizer, islice(loader, done, None), done, save)


def dcp(run):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer, loader = distribute()
    done, folder = newest(run, ".metadata")
    if folder:
        net, moments = get_state_dict(model, optimizer)
        checkpoint.load({"net": net, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=net, optim_state_dict=moments)

    def save(step):
        net, moments = get_state_dict(model, optimizer)
        checkpoint.save({"net": net, "optimizer": moments}, checkpoint_id=run / f"{step:06}")

    return train(run, model, optimizer, islice(loader, done, None), done, save)


def accelerate(run):
    from accelerate import Accelerator, utils

    utils.set_seed(0)
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*build(), DataLoader(samples(), BATCH, shuffle=True))
    done, folder = newest(run, "random_states_0.pkl")
    if folder:
        accelerator.load_state(folder)
    loader.set_epoch(0)
    batches = accelerator.skip_first_batches(loader, done)

    def save(step):
        accelerator.save_state(run / f"{step:06}")

    return train(run, model, optimizer, batches, done, save, accelerator.backward)


def lightning(run):
    from lightning import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    notes = Notes(run)
    net, optimizer = build()

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def configure_optimizers(self):
            return optimizer

        def training_step(self, batch, index):
            notes.began(self.global_step + 1, batch[1])
            return criterion(net(batch[0]), batch[1])

        def on_train_batch_end(self, *_):
            notes.made(self.global_step)

    saves = ModelCheckpoint(run, save_last=True, every_n_train_steps=EVERY)
    size = int(os.environ["WORLD_SIZE"])
    trainer = Trainer("cpu", "ddp", size, max_epochs=1, callbacks=[saves], logger=False)
    trainer.fit(Module(), DataLoader(samples(), BATCH, shuffle=True), ckpt_path="last")
    return net


def torchft(run):
    import torchft as ft

    group = int(os.environ["REPLICA_GROUP_ID"])
    groups = int(os.environ["NUM_REPLICA_GROUPS"])
    notes = Notes(run, life="of all groups")
    net, optimizer = build()
    parts = {"net": net, "optimizer": optimizer}
    manager = ft.Manager(
        pg=ft.ProcessGroupGloo(),
        min_replica_size=1,
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        load_state_dict=lambda state: [part.load_state_dict(state[name]) for name, part in parts.items()],
        replica_id=f"peer_{group}",
    )
    model = ft.DistributedDataParallel(manager, net)
    steps = ft.Optimizer(manager, optimizer)
    sampler = ft.DistributedSampler(
        samples(), replica_rank=group, num_replica_groups=groups, group_rank=0, num_replicas=1
    )
    place = run / f"place-{group}"
    done = int(place.read_text()) if place.exists() else 0
    batches = islice(DataLoader(samples(), BATCH, sampler=sampler), done, None)
    for index, (x, ids) in enumerate(batches, done + 1):
        steps.zero_grad()
        criterion(model(x), ids).backward()
        before = manager.current_step()
        steps.step()
        place.write_text(str(index))
        if manager.current_step() > before and manager.is_participating():
            notes.began(manager.current_step(), ids)
            notes.made(manager.current_step())
    manager.shutdown(wait=False)
    return net


WAYS = {
    "torchrun": ours,
    "launch/torchrun.py": ours,
    "torch.save": torch_save,
    "dcp": dcp,
    "accelerate": accelerate,
    "lightning": lightning,
    "torchft": torchft,
}


# ---- the bench ------------------------------------------------------------------------------------
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


def bits(run):
    return {path.read_text() for path in run.glob("bits-*")}


def turn(jobs, way, event, rng):
    """Seconds from the event to two new steps, and the folder of a training of its own.

    torchft has an agent a group, which meet at a lighthouse.
    """
    run = Path(tempfile.mkdtemp(dir=jobs.folder))
    agents = []
    by_groups = way == "torchft"
    if by_groups:
        place = f"localhost:{free_port()}"
        flags = "--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=10000", "--bind", place
        lighthouse = jobs.start(shutil.which("torchft_lighthouse"), *flags, cold=True)
        groups = "3" if event == "resize" else "2"
        env = {"TORCHFT_LIGHTHOUSE": f"http://{place}", "NUM_REPLICA_GROUPS": groups}
    else:  # with one store for all restarts a process may find the address of a dead one
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def start(size, **more):
        launcher = [ROOT / way] if way.startswith("launch") else ["torchrun", "--standalone"]
        words = (f"--nproc_per_node={size}", "--max_restarts=3", __file__, "--train", way, "--into", run)
        agents.append(jobs.start(*launcher, *words, cold=True, **env, **more))

    def join():
        start(1, REPLICA_GROUP_ID=str(len(agents)))

    def reach(step):
        until(
            lambda: last_step(run) >= step or any(agent.poll() for agent in agents), f"{way} at step {step}"
        )

    if by_groups:
        join()
        join()
    else:
        start(2)
    reach(rng.choice(KILLS))
    began = time.time()
    if event == "kill":
        jobs.kill(rng.choice(sorted(int(path.name.split("-")[1]) for path in run.glob("notes-*"))))
    elif event == "resize" and by_groups:
        join()
    elif event == "resize":
        agent = agents.pop()
        agent.kill(signal.SIGTERM)
        agent.wait()
        start(3, START="1")
    reach(last_step(run) + 2)  # the next one may have been under way
    seconds = time.time() - began
    for agent in agents:
        agent.ends_with(0)
    if by_groups:
        lighthouse.kill()
    return seconds, run


def main():
    args = arguments(__doc__, ways=",".join(WAYS), rounds=3, train="", into="")
    if args.train:
        model = WAYS[args.train](Path(args.into))
        weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
        Path(args.into, f"bits-{os.getpid()}").write_text(hashlib.sha256(weights).hexdigest())
        return
    print("event   way                 seconds            lost          missed        repeated      bits")
    with tempfile.TemporaryDirectory(prefix="peers-bench-") as folder, Jobs(folder) as jobs:
        for way in args.ways.split(","):
            undisturbed = bits(turn(jobs, way, "", random.Random(0))[1])
            for event in ("kill", "resize"):
                turns = [turn(jobs, way, event, random.Random(number)) for number in range(args.rounds)]
                counts = [count(run) for _, run in turns]
                columns = [f"{seconds:.1f}" for seconds, _ in turns], *zip(*counts, strict=True)
                cells = [", ".join(map(str, column)) for column in columns]
                same = all(bits(run) == undisturbed for _, run in turns)
                print(f"{event:7} {way:18}", *(f"{cell:15}" for cell in cells), "same" if same else "others")


if __name__ == "__main__":
    main()
