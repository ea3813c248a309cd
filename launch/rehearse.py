"""A rehearsal: your program runs a few times for twenty steps, and the runs are compared.

    python launch/rehearse.py train_ddp.py --model my.py:net --dataset my.py:data
    python launch/rehearse.py launch/local.sh my_loop.py      # or torchrun ..., or python ...
    python launch/rehearse.py --accept cut python my_loop.py    # its weights may depend on how a batch is cut

It runs on little of your data, in folders of its own: twice alike; killed and stopped; with each weight moved
by one ulp, and samples in another order, which shows how far rounding leads; by two processes and then three;
and without this project, as a plain loop. Exit code 0: every comparison held, notes may follow; 1: runs part;
2: a run was refused. What begins after step 20 is not seen, nor what is wrong in a plain loop, too.
"""

import atexit
import os
import pickle
import re
import shutil
import socket
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(ROOT)]

from common import errors  # noqa: E402
from common.errors import UserError, say  # noqa: E402
from common.extras.rehearsed import note_rehearsal  # noqa: E402
from common.options.user import imports_of  # noqa: E402
from common.place import MEETING, die_with_the_parent  # noqa: E402
from launch.command import NPROC, run_tool  # noqa: E402
from launch.torchrun import check_options, find_script  # noqa: E402

FORK = get_context("fork")
KILL_STEP = 11  # of two processes
MOST_PROCESSES = 3
RUNS = {  # the lives of each run, until one ends well: (processes, what they do)
    "whole": [(1, {})],
    "again": [(1, {})],
    "killed": [(1, {"kill": 6, "save_every": 5}), (1, {"stop": 8}), (1, {"die": 15}), (1, {})],
    "processes": [(2, {"kill": KILL_STEP}), (MOST_PROCESSES, {})],
    "rounded": [(1, {"ulp": 1})],
    "reversed": [(1, {"reverse": 1})],  # the samples of each batch
    "plain": [(1, {"plain": 1})],
}
COMPARED = ("whole", "processes", "rounded", "reversed", "plain")
DONE = (
    "rehearsed: 20 steps, 4 evaluations; killed three times with the same bits, as in a plain loop,\n"
    "           up to {} processes {}"
)
DRAWS = "it draws: by other numbers of processes the draws are others; compared in silence"
NORMS = "BatchNorm sees the samples of one process, as under DDP: weights depend on the number of processes"
NO_STEP = "the script made no step\nit has no Elastic, or leaves its loop at once\nrehearse one that trains"
FAMILIES = {  # what is told: fact, cause, way out
    "refused": "{gap}",
    "random": "the program is not deterministic: step {gap.step}, {gap}\n"
    "something is not seeded\n"
    "seed it before the net is made",
    "memory": "killed and resumed, step {gap.step} is another one: {gap}\n"
    "something that trains lives outside of net and optimizer: a counter, an average, a loader's place\n"
    "keep it in a buffer, or by Elastic(memory=...), or compute it from run.progress.step",
    "ranks": "two processes hold other weights from step {gap.step} on: {gap.name}\n"
    "something is drawn or changed on each by itself, maybe between `with Elastic` and `for`\n"
    "seed it, or do it before Elastic",
    "cut": "cut over processes or in pieces, step {gap.step} is another one: {gap}\n"
    "the loss or a hook depends on which samples are together\n"
    "give run.step a mean over samples, or a sum and its count; clip by clip_grad_norm; or --accept cut",
    "evaluation": "an evaluation changes the training: step {gap.step}, {gap}\n"
    "net.eval() or a judge changes buffers or weights; a plain loop keeps that, here it is put back\n"
    "leave them alone there, or turn merging off",
    "plain": "in a plain loop step {gap.step} is another one: {gap}\n"
    "the same net, optimizer, samples and loss without this project; one process, no kill\n"
    "a sparse gradient, which is dense here? a state that begins with the gradient? else report it",
}


def main(arguments):
    accept = ("", "cut: the weights may depend on how a batch is cut")
    return run_tool(rehearse_command, __doc__, arguments, accept=accept)


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
    words = [word for word in command if Path(word).resolve().parent != ROOT / "launch"]
    script = words[find_script(words) :]
    if script:
        return script
    if command[0].endswith("local.sh"):
        flags = re.sub(f"{NPROC}\0?", "", "\0".join(command[1:])).split("\0")
        return [str(ROOT / "train_ddp.py"), *filter(None, flags)]
    raise UserError(f"{' '.join(command)}: there is no script\nname a file that ends in .py, then its flags")


def import_what_it_needs(script):
    """Libraries that it imports, and data of this project: each process then begins with them."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # other threads do not survive a fork
    path = Path(script[0]).resolve()
    opts = check_options(script, processes=0)
    from common.device import gpus
    from launch.worker import preload

    preload(str(path), "launch.plain", opts.to_json() if opts else {})
    # counting GPUs must not touch CUDA in a process that forks
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if len(gpus()) < MOST_PROCESSES:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in imports_of(path):
        if not [*path.parent.glob(f"{name}*")]:  # what is beside it may draw
            with suppress(Exception):
                import_module(name)


# ---- what runs, and what it says ----
def rehearse(script, folder, accept=""):
    """({family: what is told}, notes, the key of this program)"""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), FORK, die_with_the_parent) as pool:
        run = partial(runs_of, pool, script, folder)
        whole = run(["whole"])["whole"]
        if whole.error or not whole.steps:
            return {"refused": whole.error or NO_STEP}, [], ""
        opts = whole.facts["opts"]
        most = 1 if opts.script == "dp" else min(opts.virtual_ranks or MOST_PROCESSES, MOST_PROCESSES)
        found, notes = judged(whole, partial(run, most=most))
    alarms = {family: FAMILIES[family].format(gap=gap) for family, gap in found.items()}
    if accept in alarms:
        notes.append(f"accepted: {alarms.pop(accept)}")
    notes = [f"note: {text}" for text in notes]
    if not alarms:
        near = "with the same bits" if opts.virtual_ranks else "within rounding"
        notes.insert(0, DONE.format(most, near))
    return alarms, notes, whole.facts["key"]


def runs_of(pool, script, folder, names, most=1, **change):
    """{name: Run} by `most` processes or fewer; as many runs at once as there are cores."""
    lives = [[(min(size, most), does | change) for size, does in RUNS[name]] for name in names]
    folders = [folder / name for name in names]
    return dict(zip(names, pool.map(run_of, [script] * len(names), folders, lives), strict=True))


def judged(whole, run):
    """({family: where it shows}, notes)"""
    from launch.compare import LIMIT, Noise

    runs = {"whole": whole} | run([name for name in RUNS if name != "whole"])
    killed, processes = runs["killed"], runs["processes"]
    again = whole.differs(runs["again"])
    if again and again.off > LIMIT * again.noise:
        return {"random": again}, []
    found = {}
    notes = []
    lost = (Noise(whole, runs["again"]).far if again else whole.differs)(killed)
    if lost and not killed.error:
        found["memory"] = lost

    opts = whole.facts["opts"]
    change = {}
    noise, order_matters, cut, plain = compared(runs)
    if order_matters:  # because it draws, or else in itself
        change["quiet"] = 1
        noise, order_matters, cut, plain = compared(run(COMPARED, **change))
        if not order_matters and not opts.virtual_ranks:
            notes.append(DRAWS)
    in_pieces = opts.micro_batch_size or opts.virtual_ranks
    if whole.facts["norms"] and (cut or in_pieces):
        if cut:
            notes.append(NORMS)
        noise, _, cut, frozen = compared(run(COMPARED, freeze=1, **change))
        if in_pieces:
            plain = frozen
    if opts.virtual_ranks:
        cut = whole.differs(processes)
    if noise.loud() < max(noise.grown):
        notes.append(f"one ulp grows to 1 % of a weight by step {noise.loud()}: compared up to there")

    if processes.unlike:
        found["ranks"] = processes.unlike
    elif cut and not processes.error and not (lost and cut.step >= KILL_STEP):
        found["cut"] = cut
    if runs["plain"].error:
        notes.append(f"not compared with a plain loop: {runs['plain'].error}")
    elif plain and in_pieces:
        found.setdefault("cut", plain)
    elif plain:
        found["evaluation" if plain.step == whole.facts["epoch"] + 1 else "plain"] = plain
    for error in filter(None, [killed.error, processes.error]):
        found["refused"] = error
    return found, notes


def compared(runs):
    """(Noise, whether the order within a batch makes more than that, gaps: to processes, to a plain loop)

    A gap is the first place where runs are much farther apart than rounding leads, or None.
    """
    from launch.compare import Noise

    noise = Noise(runs["whole"], runs["rounded"])
    order_matters = bool(noise.far(runs["reversed"]))
    if not order_matters:
        noise = Noise(runs["whole"], runs["rounded"], runs["reversed"])
    return noise, order_matters, noise.far(runs["processes"]), noise.far(runs["plain"])


# ---- the processes of a run ----
def run_of(script, folder, lives):
    """The Run of some lives."""
    from launch.compare import Gap, Run

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run = Run()
    for size, does in lives:
        codes = codes_of(script, folder, size, does)
        steps = {}
        said = ""
        for rank in range(size):
            said += (folder / f"said {rank}").read_text()
            for step, facts in noted(folder / f"notes {rank}"):
                if step == 0:
                    run.facts = facts
                    continue
                known = steps.setdefault(step, {})
                if rank == 0:
                    known |= facts
                for name, sketch in facts.items():
                    if not run.unlike and known.get(name, sketch).bits != sketch.bits:
                        run.unlike = Gap(step, name)
        run.steps |= steps
        told = said.rpartition("error: ")[2][-2000:].splitlines()[:3]
        run.error = "\n".join(map(str.strip, told)) if any(codes) else ""
        if not any(codes) or any(1 < code < 8 for code in codes):
            break
    return run


def codes_of(script, folder, size, does):
    """The exit codes of the processes of one life."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    forks = []
    for rank in range(size):
        place = [rank, size, rank, size, "127.0.0.1", port]
        environment = dict(zip(MEETING, map(str, place), strict=True))
        forks.append(FORK.Process(target=live, args=(script, environment, folder, does)))
        forks[-1].start()
    for fork in forks:
        fork.join()
    return [fork.exitcode for fork in forks]


def noted(path):
    """What a process has noted, up to its death."""
    with suppress(EOFError, pickle.UnpicklingError), open(path, "rb") as file:
        while True:
            yield pickle.load(file)


def live(script, environment, folder, does):
    """A process from its fork to its end: Watched, or Plain, stands in the place of Elastic."""
    from torch import nn

    import common.elastic
    from common.sampler import ElasticSampler
    from launch.plain import Plain
    from launch.rehearsed import Watched
    from launch.worker import work

    atexit._clear()
    errors.OTHER_RANKS_SECONDS = 0.0  # no agent ends them
    rank = environment["RANK"]
    sys.stdout = sys.stderr = open(folder / f"said {rank}", "w", buffering=1)
    Watched.does = does | {"run_dir": folder / "run"}
    Watched.notes = open(folder / f"notes {rank}", "wb")
    common.elastic.begin = begin
    common.elastic.Elastic = Plain if "plain" in does else Watched
    if "reverse" in does:
        inner = ElasticSampler.__iter__
        ElasticSampler.__iter__ = lambda order: (ids[::-1] for ids in inner(order))
    if "freeze" in does:
        nn.modules.batchnorm._BatchNorm.train = lambda norm, mode=True: nn.Module.train(norm, False)
    work(script, environment, [])


def begin(opts):
    """Takes the place of the scripts' own, which looks whether the user's run is complete."""
    from common.elastic import pin

    pin(opts)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
