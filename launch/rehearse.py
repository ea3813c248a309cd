"""A rehearsal: your program runs a few times for twenty steps, and the runs are compared.

    python launch/rehearse.py train_ddp.py --model my.py:net --dataset my.py:data
    python launch/rehearse.py launch/local.sh my_loop.py      # or torchrun ..., or python ...
    python launch/rehearse.py --accept cut python my_loop.py    # its weights may depend on how a batch is cut

It runs on little of your data, in folders of its own: twice alike; killed and stopped; with each weight moved
by one ulp, and samples in another order, which shows how far rounding leads; by two processes and then three;
and without this project, as a plain loop. Exit code 0: every comparison held, notes may follow; 1: runs part;
2: a run was refused. What begins after step 20 is not seen, nor what is wrong in a plain loop, too.
"""

import json
import os
import pickle
import re
import shutil
import socket
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(ROOT)]

from common.errors import UserError, run_command, say  # noqa: E402
from common.extras.rehearsed import note_rehearsal  # noqa: E402
from common.options import parse_options  # noqa: E402
from common.options.user import imports_of  # noqa: E402
from common.place import MEETING, die_with_the_parent  # noqa: E402
from launch.command import read_command  # noqa: E402

FORK = get_context("fork").Process
KILL_STEP = 11  # of two processes
MOST_PROCESSES = 3
RUNS = {  # the lives of each run, until one ends well: (processes, what they do)
    "whole": [(1, {})],
    "again": [(1, {})],
    "killed": [(1, {"kill": 6, "save_every": 5}), (1, {"stop": 8}), (1, {"die": 15}), (1, {})],
    "rounded": [(1, {"ulp": 1})],
    "reversed": [(1, {"reverse": 1})],
    "processes": [(2, {"kill": KILL_STEP}), (MOST_PROCESSES, {})],
    "plain": [(1, {"plain": 1})],
}
COMPARED = ("whole", "rounded", "reversed", "plain", "processes")
SURVIVES = {"kill", "stop", "die"}  # what another life follows on
DONE = (
    "rehearsed: 20 steps, 4 evaluations; killed three times with the same bits, as in a plain loop,\n"
    "           {}"
)
DRAWS = "it draws: by other numbers of processes the draws are others; compared in silence"
NORMS = "BatchNorm sees the samples of one process, as under DDP: weights depend on the number of processes"
FAMILIES = {  # what is told: fact, cause, way out
    "refused": "{error}",
    "random": "the program is not deterministic: step {gap.step}, {gap}\n"
    "something is not seeded\n"
    "seed it before the net is made",
    "memory": "killed and resumed, step {gap.step} is another one: {gap}\n"
    "something that trains lives outside of net and optimizer: a counter, an average, a loader's place\n"
    "keep it in a buffer, or by Elastic(memory=...), or compute it from run.progress.step",
    "ranks": "two processes hold other weights from step {gap.step} on: {gap.name}\n"
    "something is drawn or changed on each by itself, maybe between `with Elastic` and `for`\n"
    "seed it, or do it before Elastic",
    "cut": "two processes part from one in step {gap.step}: {gap}\n"
    "the loss or a hook depends on which samples are together\n"
    "give run.step a mean over samples, or a sum and its count; clip by clip_grad_norm; or --accept cut",
    "evaluation": "an evaluation changes the training: step {gap.step}, {gap}\n"
    "net.eval() or a judge changes what trains, and net.train() does not undo it\n"
    "leave weights and buffers alone there, or turn merging off",
    "plain": "in a plain loop step {gap.step} is another one: {gap}\n"
    "the same net, optimizer, samples and loss without this project; one process, no kill\n"
    "inputs of float64? a state that begins with the gradient? report it, if it is none",
}


def main(arguments):
    args = read_command(__doc__, arguments, accept=("", "cut: the weights may depend on how a batch is cut"))
    return run_command(lambda: rehearse_command(args))


def rehearse_command(args):
    """Prints what came of the script of a command; returns the exit code."""
    script = script_of(args.command)
    import_what_it_needs(script)
    with tempfile.TemporaryDirectory(prefix="rehearse-") as folder:
        alarms, notes, key = rehearse(script, Path(folder), args.accept)
    for text in notes:
        say(text)
    for text in alarms.values():
        say("error: " + text.replace("\n", "\n       "))
    if not alarms:
        note_rehearsal(key)
    return 2 if "refused" in alarms else int(bool(alarms))


def script_of(command):
    """The script and its flags, without what starts it."""
    for i, word in enumerate(command):
        path = Path(word).resolve()
        if path.suffix == ".py" and path.is_file() and path.parent != ROOT / "launch":
            return command[i:]
    if command[0].endswith("local.sh"):
        flags = re.sub("--nproc[=\0][0-9]+\0?", "", "\0".join(command[1:])).split("\0")
        return [str(ROOT / "train_ddp.py"), *filter(None, flags)]
    raise UserError(f"{' '.join(command)}: there is no script\nname a file that ends in .py, then its flags")


def import_what_it_needs(script):
    """Libraries that it imports, and data of this project: each process then begins with them."""
    for name in MEETING:
        os.environ.pop(name, None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # other threads do not survive a fork
    path = Path(script[0]).resolve()
    sys.path.insert(0, str(path.parent))
    sys.path.insert(0, str(ROOT))
    options = {}
    if b"parse_options" in path.read_bytes():
        sys.argv = script
        options = parse_options("", script[1:], processes=0).to_json()
    from common.device import gpus
    from launch.worker import preload

    preload(str(path), "common.elastic", options)
    # counting GPUs must not touch CUDA in a process that forks
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if len(gpus()) < MOST_PROCESSES:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in imports_of(path):
        if not [*path.parent.glob(f"{name}*")] or path.parent == ROOT:  # what is beside it may draw
            with suppress(Exception):
                import_module(name)


# ---- what runs, and what it says ----
def rehearse(script, folder, accept=""):
    """({family: what is told}, notes, the key of this program)"""
    from launch.compare import LIMIT, Noise

    most = MOST_PROCESSES

    def run(names, **change):
        """{name: Run}, as many at once as there are cores."""
        forks = []
        cores = len(os.sched_getaffinity(0))
        for number, name in enumerate(names):
            lives = [(min(size, most), does | change) for size, does in RUNS[name]]
            forks.append(FORK(target=note_run, args=(script, folder / name, lives)))
            if number >= cores:
                forks[number - cores].join()
            forks[-1].start()
        for fork in forks:
            fork.join()
        return {name: pickle.loads((folder / f"{name}/run.pickle").read_bytes()) for name in names}

    alarms = {}
    notes = []

    def alarm(family, gap=None, error=""):
        alarms[family] = FAMILIES[family].format(gap=gap, error=error)

    whole = run(["whole"])["whole"]
    if whole.error:
        alarm("refused", error=whole.error)
        return alarms, notes, ""
    slices = whole.facts["slices"]
    most = 1 if whole.facts["script"] == "dp" else slices or most
    runs = {"whole": whole} | run(["again", "killed", "processes"])
    processes = runs["processes"]
    change = {"virtual_ranks": 0} if slices else {}  # as in a plain loop
    runs |= run([name for name in COMPARED if slices or name not in runs], **change)
    noise = Noise(runs["whole"], runs["rounded"], runs["reversed"])

    again = whole.differs(runs["again"])
    if again and again.off > LIMIT * again.noise:
        alarm("random", again)
        return alarms, notes, ""
    lost = (noise.far if again else whole.differs)(runs["killed"])
    if lost and not runs["killed"].error:
        alarm("memory", lost)

    nearest, measured = noise, runs  # those of the pass that counts
    names = ["plain"] if slices else ["plain", "processes"]
    gaps = {name: noise.far(runs[name]) for name in names}
    if Noise(runs["whole"], runs["rounded"]).far(runs["reversed"]):
        change["quiet"] = 1
        measured = run(COMPARED, **change)
        nearest = Noise(measured["whole"], measured["rounded"])
        if not nearest.far(measured["reversed"]):  # else the order of a batch matters by itself
            notes += [] if slices else [DRAWS]
            nearest = Noise(measured["whole"], measured["rounded"], measured["reversed"])
        gaps = {name: gaps[name] or nearest.far(measured[name]) for name in gaps}
    if whole.facts["norms"] and gaps.get("processes"):
        notes.append(NORMS)
        measured = run(COMPARED, freeze=1, **change)
        nearest = Noise(measured["whole"], measured["rounded"], measured["reversed"])
        gaps["processes"] = nearest.far(measured["processes"])
        if whole.facts["pieces"]:
            gaps["plain"] = nearest.far(measured["plain"])
    if noise.loud() < max(noise.grown):
        notes.append(f"one ulp grows to 1 % of a weight by step {noise.loud()}: compared up to there")

    gap = whole.differs(processes) if slices else gaps["processes"]
    if processes.unlike:
        alarm("ranks", processes.unlike)
    elif gap and not processes.error and not (lost and gap.step >= KILL_STEP):
        alarm("cut", gap)
    gap = gaps["plain"]
    if runs["plain"].error:
        notes.append(f"not compared with a plain loop: {runs['plain'].error}")
    elif gap:
        alarm("evaluation" if gap.step == whole.facts["epoch"] + 1 else "plain", gap)
    for error in filter(None, [runs["killed"].error, processes.error]):
        alarm("refused", error=error)
    accepted = alarms.pop(accept, "")
    if accepted:
        notes.append(f"accepted: {accepted.splitlines()[0]}")
    if not alarms:
        ratio = max((ratio for ratio, _ in nearest.gaps(measured["processes"])), default=0.0)
        near = "with the same bits" if slices else f"within {ratio:.1f} x rounding"
        near = f"two and three processes {near}" if most > 1 else "train_dp.py has one process"
        notes = [DONE.format(near), *(f"note: {text}" for text in notes)]
    return alarms, notes, whole.facts["key"]


# ---- the processes of a run ----
def note_run(script, folder, lives):
    """Writes down the Run of some lives."""
    import torch

    from launch.compare import ROW, Gap, Run, sketch_of
    from launch.rehearsed import live

    die_with_the_parent()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run = Run()
    rows = []
    for number, (size, does) in enumerate(lives):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        forks = []
        for rank in range(size):
            place = [rank, size, rank, size, "127.0.0.1", port]
            environment = dict(zip(MEETING, map(str, place), strict=True))
            forks.append(FORK(target=live, args=(script, environment, folder, number, does)))
            forks[-1].start()
        for fork in forks:
            fork.join()
        codes = [fork.exitcode for fork in forks]
        steps = {}
        for rank in range(size):
            for facts in noted(folder / f"notes {number} {rank}"):
                if "row" in facts:
                    rows.append(facts["row"] | {"step": facts["step"]})
                elif "named" not in facts:
                    run.facts = facts
                else:
                    known = steps.setdefault(facts["step"], facts["named"])
                    for name, sketch in facts["named"].items():
                        if not run.unlike and known.get(name, sketch).bits != sketch.bits:
                            run.unlike = Gap(facts["step"], name)
        run.steps |= steps
        said = "".join((folder / f"said {number} {rank}").read_text() for rank in range(size))
        said = said.rpartition("error: ")[2] if "error: " in said else said[-200:]
        run.error = "\n".join(line.strip() for line in said.splitlines()[:3]) if any(codes) else ""
        if not any(codes) or not SURVIVES & does.keys() or any(1 < code < 8 for code in codes):
            break
    with suppress(OSError):
        rows += map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    for row in rows:
        for name, value in row.items():
            if isinstance(value, (int, float)) and name != "time" and row["step"] in run.steps:
                number = torch.tensor([value], dtype=torch.float64)
                run.steps[row["step"]][ROW + name] = sketch_of(number, 2e-7)
    (folder / "run.pickle").write_bytes(pickle.dumps(run))


def noted(path):
    """What a process has noted, up to its death."""
    with suppress(EOFError, pickle.UnpicklingError), open(path, "rb") as file:
        while True:
            yield pickle.load(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
