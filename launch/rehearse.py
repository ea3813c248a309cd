"""A rehearsal: your program runs a few times for twenty steps, and the runs are compared.

    python launch/rehearse.py train_ddp.py --model my.py:net --dataset my.py:data
    python launch/rehearse.py launch/local.sh my_loop.py --width 64      # or torchrun ..., or python ...

It runs on little of your data, in folders of its own: twice alike; killed and stopped; with each weight moved by
one ulp, and samples in another order, which shows how far rounding leads; by two processes and then three; and
without this project, as a plain loop. Exit code 0: every comparison held, notes may follow; 1: runs part;
2: a run was refused. What begins after step 20 is not seen.
"""

import argparse
import json
import os
import pickle
import shutil
import socket
import sys
import tempfile
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(ROOT)]

from common.errors import UserError, run_command, say  # noqa: E402
from common.options import note_rehearsal, parse_options  # noqa: E402
from common.place import MEETING, die_with_the_parent  # noqa: E402
from launch.compare import ROWS, Gap, Noise, Run, number_of  # noqa: E402

KILL_STEP = 11  # of two processes
RUNS = {  # the lives of each run: (processes, what they do)
    "undisturbed": [(1, {})],
    "again": [(1, {})],
    "killed": [(1, {"kill": 6}), (1, {"stop": 8}), (1, {"die": 15}), (1, {})],
    "rounded": [(1, {"ulp": 1})],
    "reversed": [(1, {"reverse": 1})],
    "processes": [(2, {"kill": KILL_STEP}), (3, {})],
    "plain": [(1, {"plain": "as given"}), (1, {"plain": "converted"})],
}
ALONE = ("undisturbed", "rounded", "reversed", "plain")  # are as in a plain loop
DONE = (
    "rehearsed: 20 steps, 4 evaluations; one process as in a plain loop, killed three times with the same bits,\n"
    "           two and three processes within {:.0f} x rounding"
)
WAYS_OUT = {
    "random": ("something is not seeded", "seed it before the net is made"),
    "memory": (
        "something that trains lives outside of net and optimizer: a counter, an average, a loader's place",
        "keep it in a buffer of the net, give it to Elastic(memory=...), or compute it from run.progress.step",
    ),
    "cut": (
        "the loss or a hook depends on which samples are together",
        "give run.step a mean over samples, or their sum and count; clip by clip_grad_norm; or --accept cut",
    ),
    "ranks": (
        "something is drawn or changed on each by itself, maybe between `with Elastic` and `for`",
        "seed it, or do it before Elastic",
    ),
    "evaluation": (
        "net.eval() or a judge changes what trains, and net.train() does not undo it",
        "leave weights and buffers alone there, or turn merging off",
    ),
    "plain": (
        "the same net, optimizer, samples and loss without this project; one process, no kill",
        "inputs of float64? a state that begins with the gradient? report it, if it is none",
    ),
}


def main(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accept", choices=["cut"], help="the weights may depend on how a batch is cut")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(arguments)
    if not args.command:
        parser.error("which command?")
    return run_command(lambda: command_rehearsed(args))


def command_rehearsed(args):
    """Rehearses the script of a command, prints what came; returns the exit code."""
    script = script_of(args.command)
    import_what_it_needs(script)
    with tempfile.TemporaryDirectory(prefix="rehearse-") as folder:
        verdict = rehearse(script, Path(folder), args.accept)
    verdict.print()
    if not verdict.code:
        note_rehearsal(verdict.key)
    return verdict.code


def script_of(command):
    """The script and its flags, without what starts it."""
    for i, word in enumerate(command):
        path = Path(word).resolve()
        if word.endswith(".py") and path.is_file() and path.parent != ROOT / "launch":
            return command[i:]
    if command[0].endswith("local.sh"):
        return [str(ROOT / "train_ddp.py"), *command[1:]]
    raise UserError(f"{' '.join(command)}: there is no script\nname a file that ends in .py, then its flags")


def import_what_it_needs(script):
    """Libraries that it imports, and data of this project: each process then begins with them."""
    for name in MEETING:
        os.environ.pop(name, None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # other threads do not survive a fork
    folder = Path(script[0]).resolve().parent
    sys.path.insert(1, str(folder))
    from launch.worker import preload
    text = Path(script[0]).read_bytes()
    options = {}
    if b"parse_options" in text:
        sys.argv = script
        options = parse_options("", processes=0).to_json()
    preload("common.elastic", options)
    from common.options.user import imports_of

    for name in imports_of(Path(script[0])):
        if not any(folder.glob(f"{name}*")):
            with suppress(Exception):
                import_module(name)


@dataclass
class Verdict:
    """What a rehearsal has found."""

    alarms: dict[str, str] = field(default_factory=dict)  # {family: three lines}
    notes: list[str] = field(default_factory=list)
    refused: str = ""  # the program's own error
    key: str = ""
    times: float = 0.0  # the largest distance of several processes, over rounding

    @property
    def code(self) -> int:
        return 2 if self.refused else int(bool(self.alarms))

    def alarm(self, family, fact):
        self.alarms[family] = "\n".join([fact, *WAYS_OUT[family]])

    def print(self):
        errors = filter(None, [*self.alarms.values(), self.refused])
        if not self.code:
            say(DONE.format(self.times))
        for note in self.notes:
            say(f"note: {note}")
        for text in errors:
            say("error: " + text.replace("\n", "\n       "))


def rehearse(script, folder, accept=None):
    """The Verdict on a script."""

    def run(names, most=3, **change):
        """{name: Run}, as many at once as there are cores."""
        pids = []
        cores = len(os.sched_getaffinity(0))
        for name in names:
            if len(pids) >= cores:
                os.waitpid(pids.pop(0), 0)
            lives = [(min(size, most), does | change) for size, does in RUNS[name]]
            pids.append(in_a_fork(note, script, folder / name, lives))
        for pid in pids:
            os.waitpid(pid, 0)
        return {name: pickle.loads((folder / f"{name}/run.pickle").read_bytes()) for name in names}

    return judge(run, accept)


def in_a_fork(function, *arguments):
    """The pid of a process that calls a function."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_the_parent()
        code = function(*arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def note(script, folder, lives):
    """Writes the Run down."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run = ran(script, folder, lives)
    (folder / "run.pickle").write_bytes(pickle.dumps(run))
    return 0


def judge(run, accept):
    """Runs what is needed, and compares."""
    verdict = Verdict()
    runs = run(["undisturbed"])
    whole = runs["undisturbed"]
    if not whole.ended:
        verdict.refused = whole.error
        return verdict
    slices = whole.facts["opts"].virtual_ranks
    change = {"virtual_ranks": 0} if slices else {}  # as in a plain loop
    runs |= run(["again", "killed", "processes"], slices or 3)
    killed, processes = (runs[name] for name in ("killed", "processes"))
    runs |= run([name for name in ALONE if slices or name not in runs], **change)
    first = Pass(runs)
    again = whole.differs(runs["again"])
    if again and first.noise.far(runs["again"]):
        verdict.alarm("random", f"the program is not deterministic: step {again.step}, {again}")
    lost = (first.noise.far if again else whole.differs)(killed)
    if not killed.ended:
        verdict.refused = killed.error
    elif lost:
        verdict.alarm("memory", f"killed and resumed, step {lost.step} is another one: {lost}")
    if "random" in verdict.alarms:
        return verdict

    found = first
    names = [*ALONE, "processes"]
    if first.draws:
        change["quiet"] = 1
        found = Pass(run(names, **change), first)
        verdict.notes.append("it draws: other numbers of processes draw others; compared in silence")
    if whole.facts["norms"] and (found.parts["plain"] or found.parts["processes"]):
        found = Pass(run(names, freeze=1, **change))
        verdict.notes.append(
            "BatchNorm sees the samples of one process, as under DDP: weights depend on the number of processes"
        )
    if first.noise.loud:
        verdict.notes.append(f"one ulp grows to 1 % of a weight by step {first.noise.loud}: compared up to there")

    parts = found.parts["processes"]
    if slices:
        parts = whole.differs(processes)
    if not processes.ended:
        verdict.refused = processes.error
    elif processes.unlike:
        verdict.alarm("ranks", f"two processes hold other weights from step {processes.unlike.step} on: {processes.unlike.name}")
    elif parts and not (lost and parts.step >= KILL_STEP):
        fact = f"two processes part from one in step {parts.step}: {parts}"
        if accept == "cut":
            verdict.notes.append(fact)
        else:
            verdict.alarm("cut", fact)
    parts = found.parts["plain"]
    if not runs["plain"].ended:
        verdict.notes.append(f"not compared with a plain loop: {runs['plain'].error.splitlines()[0]}")
    elif parts and parts.step == whole.facts["epoch"] + 1:
        verdict.alarm("evaluation", f"an evaluation changes the training: step {parts.step}, {parts}")
    elif parts:
        verdict.alarm("plain", f"in a plain loop step {parts.step} is another one: {parts}")
    verdict.key = whole.facts["key"]
    verdict.times = found.noise.times(processes)
    return verdict


class Pass:
    """Runs that differ in one thing, and where two of them part from the undisturbed one."""

    def __init__(self, runs, before=None):
        base = runs["undisturbed"]
        self.noise = Noise(base, runs["rounded"])
        self.draws = self.noise.far(runs["reversed"])
        if not (self.draws and before):
            self.noise = Noise(base, runs["rounded"], runs["reversed"])
        self.parts = {}
        for name in ("plain", "processes"):
            earlier = before.parts[name] if before else None
            self.parts[name] = runs[name].ended and (earlier or self.noise.far(runs[name]))


# ---- the processes of a run ----
def ran(script, folder, lives):
    """The Run of some lives, one after the other, until one ends well."""
    run = Run()
    rows = []
    for number, (size, does) in enumerate(lives):
        codes = fork(script, folder, number, size, does)
        run.said = "".join((folder / f"said {number} {rank}").read_text() for rank in range(size))
        steps = {}
        for rank in range(size):
            for facts in noted(folder / f"notes {number} {rank}"):
                if "row" in facts:
                    rows.append((facts["step"], facts["row"]))
                elif "named" not in facts:
                    run.facts = facts
                else:
                    step = facts["step"]
                    known = steps.setdefault(step, facts["named"])
                    for name, sketch in facts["named"].items():
                        if not run.unlike and known.get(name, sketch).bits != sketch.bits:
                            run.unlike = Gap(step, name)
        run.steps |= steps
        run.ended = not any(codes)
        disturbed = {"kill", "stop", "die", "plain"} & does.keys()
        if run.ended or not disturbed or 2 in codes and "plain" not in does:
            break
    with suppress(OSError):
        for line in (folder / "run/metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            rows.append((row.pop("step"), row))
    for step, row in rows:
        for name, value in row.items():
            if isinstance(value, (int, float)) and name != "time" and step in run.steps:
                run.steps[step][ROWS + name] = number_of(value)
    return run


def fork(script, folder, number, size, does):
    """The exit codes of a life."""
    from launch.rehearsed import live

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pids = []
    for rank in range(size):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {name: str(value) for name, value in place.items()}
        pids.append(in_a_fork(live, script, environment, folder, number, does))
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def noted(path):
    """What a process has noted, up to its death."""
    with suppress(EOFError, pickle.UnpicklingError), open(path, "rb") as file:
        while True:
            yield pickle.load(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
