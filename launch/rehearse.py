"""A rehearsal: your program runs a few times for twenty steps, and the runs are compared.

    python launch/rehearse.py train_ddp.py --model my.py:net --dataset my.py:data
    python launch/rehearse.py launch/local.sh my_loop.py      # or torchrun ..., or python ...
    python launch/rehearse.py --accept cut python my_loop.py    # its weights may depend on how a batch is cut

It runs on little of your data, in a folder of its own, without --amp: undisturbed; killed and stopped; with
each weight moved by one ulp, which shows how far rounding leads; by two processes and then three; and without
this project, as a plain loop. Exit code 0: every comparison held; 1: two runs part; 2: a run was refused.
What begins after step 20 is not seen, nor what is wrong in a plain loop, too.
"""

import atexit
import os
import pickle
import re
import shutil
import socket
import sys
import tempfile
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing.context import ForkProcess
from pathlib import Path
from signal import SIGKILL, SIGTERM

ROOT = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(ROOT)]

from common.errors import UserError, say  # noqa: E402
from common.extras.rehearsed import note_rehearsal  # noqa: E402
from common.options.user import imports_of  # noqa: E402
from common.place import MEETING  # noqa: E402
from launch.command import NPROC, run_tool  # noqa: E402
from launch.torchrun import check_options, find_script  # noqa: E402

FIRST_KILL = 6
MOST_PROCESSES = 3
RUNS = {  # the lives of each run, until one ends well: what they do (launch/rehearsed.py)
    "whole": [{}],
    "killed": [{"step": (FIRST_KILL, SIGKILL)}, {"step": (8, SIGTERM)}, {"report": (15, SIGKILL)}, {}],
    "processes": [{"size": 2, "step": (11, SIGKILL)}, {"size": MOST_PROCESSES}],
    "rounded": [{"ulp": 1}],
    "plain": [{"plain": 1}],
}
STRUCK = {1, 143, -SIGKILL}  # exit codes of a life
DONE = """rehearsed: 20 steps, 4 evaluations; killed three times with the same bits, as in a plain loop,
           up to {} processes within rounding, or with --virtual-ranks the same bits"""
AS_DDP = """note: it draws, or BatchNorm sees the samples of one process, as under DDP: its weights depend on
      the number of processes, unless with --virtual-ranks; compared without that"""
NO_STEP = "the script made no step\nit has no Elastic, or leaves its loop at once\nrehearse one that trains"
FAMILIES = {  # what is told: fact, cause, way out
    "random": """the program is not deterministic: step {gap.step}, {gap.text}
something is not seeded
seed it before the net is made""",
    "memory": """killed and resumed, step {gap.step} is another one: {gap.text}
something that trains lives outside of net and optimizer: a counter, an average, a loader's place
keep it in a buffer, or by Elastic(memory=...), or compute it from run.progress.step""",
    "ranks": """two processes hold other weights from step {gap.step} on: {gap.text}
something is drawn or changed on each by itself, maybe between `with Elastic` and `for`
seed it, or do it before Elastic""",
    "cut": """cut over processes or in pieces, step {gap.step} is another one: {gap.text}
the loss or a hook depends on which samples are together
give run.step a mean over samples, or a sum and its count; clip by clip_grad_norm; or --accept cut""",
    "evaluation": """an evaluation changes the training: step {gap.step}, {gap.text}
net.eval() or a judge changes buffers or weights; a plain loop keeps that, here it is put back
leave them alone there, or turn merging off""",
    "plain": """in a plain loop step {gap.step} is another one: {gap.text}
the same net, optimizer, samples and loss without this project; one process, no kill
a sparse gradient, which is dense here? a state that begins with the gradient? else report it""",
}


def main(arguments):
    accept = ("", "cut: the weights may depend on how a batch is cut")
    return run_tool(rehearse_command, __doc__, arguments, accept=accept)


def rehearse_command(args):
    """Print what came of the script of a command; return the exit code."""
    script = script_of(args.command)
    import_what_it_needs(script)
    with tempfile.TemporaryDirectory(prefix="rehearse-") as folder:
        note_rehearsal(rehearse(script, Path(folder), args.accept))
    return 0


def script_of(command):
    """Return the script and its flags, without what starts it."""
    words = [word for word in command if Path(word).resolve().parent != ROOT / "launch"]
    script = words[find_script(words) :]
    if script:
        return script
    if command[0].endswith("local.sh"):
        flags = re.sub(f"{NPROC}\0?", "", "\0".join(command[1:])).split("\0")
        return [str(ROOT / "train_ddp.py"), *filter(None, flags)]
    raise UserError(f"{' '.join(command)}: there is no script\nname a file that ends in .py, then its flags")


def import_what_it_needs(script):
    """Import libraries that it needs, open data of this project: each process then begins with them."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # other threads do not survive a fork
    path = Path(script[0]).resolve()
    opts = check_options(script, processes=0)
    from common.device import gpus
    from launch.worker import preload

    preload(str(path), "launch.rehearsed", opts.to_json() if opts else {})
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
    """Say what came of it, and return the key of this program; a UserError says what is wrong in it."""
    from launch.compare import LIMIT, grown, parted

    run = partial(run_of, script, folder)
    whole = run("whole")
    if not whole:
        raise UserError(NO_STEP)
    key, opts, batches = pickle.loads((folder / "facts").read_bytes())
    most = 1 if opts.script == "dp" else min(opts.virtual_ranks or MOST_PROCESSES, MOST_PROCESSES)
    rounded = run("rounded")
    chaos = [step for step in whole if LIMIT * grown(whole[step], rounded.get(step, {})) > 1]
    if chaos:
        say(f"note: one ulp grows to 0.1 % of a weight by step {chaos[0]}: compared up to there")

    def far(name, steps):
        """Find where they part from the whole run, by more than rounding, and than what DDP does, too."""
        gap = parted(whole, steps, rounded)
        if gap:
            calm, noise, steps = (run(name, most, calm=1) for name in ("whole", "rounded", name))
            if parted(whole, calm):
                say(AS_DDP)
            gap = parted(calm, steps, noise)
        return gap

    killed = run("killed")
    unseeded = parted(whole, killed, whole)
    if unseeded and unseeded.step < FIRST_KILL:
        tell("random", unseeded)
    lost = parted(whole, killed)
    if lost and lost.step < FIRST_KILL:  # a GPU's atomics make other bits in each run
        lost = parted(whole, killed, rounded)
    tell("memory", lost)

    other = None
    try:
        other = far("plain", run("plain"))
    except UserError as error:
        say(f"note: not compared with a plain loop: {error}")
    family = "plain"
    if opts.micro_batch_size or opts.virtual_ranks:
        family = "cut"
    elif other and other.step == batches + 1:
        family = "evaluation"
    tell(family, other, accept)

    processes = run("processes", most)
    cut = parted(whole, processes) if opts.virtual_ranks else far("processes", processes)
    tell("cut", cut, accept)
    say(DONE.format(most))
    return key


def tell(family, gap, accept=""):
    """End the rehearsal where two runs part, unless that is accepted."""
    if gap and family != accept:
        raise UserError(FAMILIES[family].format(gap=gap), code=1)


# ---- the processes of a run ----
def run_of(script, folder, name, most=1, **change):
    """Return what rank 0 notes, {step: {name: Sketch}}, in this run by `most` processes or fewer."""
    from launch.compare import parted

    shutil.rmtree(folder)
    folder.mkdir()
    steps = {}
    for does in RUNS[name]:
        size = min(does.get("size", 1), most)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        places = [f"{rank} {size} {rank} {size} 127.0.0.1 {port}" for rank in range(size)]
        forks = [ForkProcess(target=live, args=(script, place, folder, does | change)) for place in places]
        for fork in forks:
            fork.start()
        for fork in forks:
            fork.join()
        first, *others = (noted(folder / f"notes {rank}") for rank in range(size))
        for other in others:
            tell("ranks", parted(first | other, other | first))  # of what both have noted
        steps |= first
        codes = {fork.exitcode for fork in forks}
        if codes - STRUCK:
            break
    if codes != {0}:
        told = (folder / "said").read_text().rpartition("error: ")[2].splitlines()
        raise UserError("\n".join(map(str.strip, told[:3])))
    return steps


def live(script, place, folder, does):
    """Live as a process from its fork to its end: Watched, or Plain, stands in the place of Elastic."""
    import common.elastic
    from launch.rehearsed import Plain, Watched
    from launch.worker import work

    atexit._clear()
    sys.stdout = sys.stderr = open(folder / "said", "a", buffering=1)
    environment = dict(zip(MEETING, place.split(), strict=True))
    Watched.does = does
    Watched.folder = folder
    Watched.notes = open(folder / f"notes {environment['RANK']}", "wb", buffering=0)
    common.elastic.begin = lambda opts: True  # not whether the user's own run is complete
    common.elastic.Elastic = Plain if "plain" in does else Watched
    work(script, environment, [])


def noted(path):
    """Read what a process has noted, up to its death."""
    steps = {}
    with suppress(EOFError, pickle.UnpicklingError), open(path, "rb") as file:
        while True:
            step, sketches = pickle.load(file)
            steps.setdefault(step, {}).update(sketches)
    return steps


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
