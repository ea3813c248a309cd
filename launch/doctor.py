"""Looks whether a training can run here, before it starts: a line each, ok or what to mend; exit code 0 or 1.

    python launch/doctor.py
    python launch/doctor.py --nproc_per_node=8 train_ddp.py --run-dir /shared/run
    python launch/doctor.py --nnodes=1:4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_id=JOB \\
        --rdzv_endpoint=HOST:29400 --rdzv_conf=is_host=0 train_ddp.py --run-dir /shared/run

Put it in the place of the launcher, with the same words. With several machines start it on all of them within
half a minute: they compare clocks, versions, data and the run folder over the port after that of the
rendezvous. It leaves nothing behind.
"""
import contextlib
import fcntl
import importlib
import math
import os
import resource
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "launch")]

from network import address, gets_lock, machines, name, port  # noqa: E402

from common.errors import UserError, one_line, say  # noqa: E402
from common.options import parse_options  # noqa: E402
from common.options.environment import flag_in  # noqa: E402

PROBE_BYTES, PROBE_SECONDS = 64 << 20, 2
GRACE_SECONDS = 600      # that the launchers here give a process which still saves
COPIES = 3  # of the state that may pass the disk at a stop: of a save under way, of its check, of the rescue


def main(arguments):
    """Prints a line for each check; returns the exit code."""
    if {"-h", "--help"} & set(arguments[:1]):
        say(__doc__)
        return 0
    job = job_of(arguments)
    if not job:
        return 1
    bad = 0
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=existing(job.opts.run_dir)) as folder:
        job.folder = Path(folder)
        for check in CHECKS[job.high == 1]:
            try:
                told, begin = check(job), "ok  "
            except Exception as error:
                told, begin, bad = words_of(error), "mend", bad + 1
            say(f"{begin}  {check.__name__.replace('_', ' ')}: {told}")
    return 1 if bad else 0


def words_of(error):
    known = isinstance(error, UserError | OSError)
    return str(error).replace("\n", "\n      ") if known else f"{type(error).__name__}: {one_line(error)}"


def job_of(arguments):
    """What would be started; None if its flags are wrong, which is printed."""
    at = next((i for i, text in enumerate(arguments) if text.endswith(".py") and text[0] != "-"),
              len(arguments))
    agent, script = arguments[:at], arguments[at:] or [str(ROOT / "train_ddp.py")]
    own = not Path(script[0]).name.startswith("train_")
    if own and not Path(script[0]).is_file():
        print(f"mend  script: {script[0]} does not exist")
        return None
    if own and b"parse_options" not in Path(script[0]).read_bytes():
        say(f"ok    script: what {script[0]} trains, and where, is not looked at: below is train_ddp.py")
        script = [str(ROOT / "train_ddp.py")]

    def flag(name):
        return flag_in(agent, name, os.environ)

    low, _, high = (flag("nnodes") or "1").partition(":")
    each, endpoint = flag("nproc_per_node") or "1", flag("rdzv_endpoint")
    if not endpoint and flag("master_addr"):
        endpoint = f"{flag('master_addr')}:{flag('master_port') or 29500}"
    kind = Path(script[0]).stem.removeprefix("train_")
    known = int(each) if each.isdecimal() and high in ("", "1") else 0
    try:
        opts = parse_options("", script[1:], kind if kind in ("ddp", "dp", "mp") else None, known)
        low, high = int(low), int(high or low)
    except (SystemExit, ValueError) as error:
        print(f"mend  flags: {error if isinstance(error, ValueError) else 'see the error above'}")
        return None
    host, _, number = (endpoint or "").rpartition(":")
    place = (host.strip("[]"), int(number)) if host and number.isdecimal() else None
    hosted = "is_host=0" in (flag("rdzv_conf") or "")
    return SimpleNamespace(agent=agent, opts=opts, low=low, high=high, each=each, file=endpoint, place=place,
                           hosted=hosted, size=0, facts={}, speed=0, data=None)


def run_folder(job):
    """It is ours alone, takes files, renames them, and writes at a known speed."""
    if job.opts.run_dir.is_dir():
        from common.checkpoint import trusted
        trusted(job.opts.run_dir)
    block, done, began = os.urandom(1 << 22), 0, time.monotonic()
    with open(job.folder / "new", "wb", buffering=0) as file:
        while done < PROBE_BYTES and time.monotonic() - began < PROBE_SECONDS:
            done += file.write(block)
        os.fsync(file.fileno())
    job.speed = done / max(time.monotonic() - began, 1e-6)
    (job.folder / "old").touch()
    os.rename(job.folder / "new", job.folder / "old")
    if [path.name for path in job.folder.iterdir()] != ["old"] or os.path.getsize(job.folder / "old") != done:
        raise UserError(f"{job.opts.run_dir}: a renamed file does not take the other one's place\n"
                        "use a file system that renames as POSIX says")
    return f"{job.opts.run_dir} takes {job.speed / 1e6:,.0f} MB/s, synced, and renames"


def locks(job):
    """Two processes of this machine must not both get a lock: two jobs would write into one run."""
    with open(job.folder / "lock", "wb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{job.opts.run_dir}: no locks there ({error.strerror})\n"
                            "mount it with locks (NFS: not nolock), or use another --run-dir") from None
        child = os.fork()
        if not child:
            os._exit(int(gets_lock(job.folder / "lock")))
        if os.waitpid(child, 0)[1]:
            raise UserError(f"{job.opts.run_dir}: two processes get the same lock\n"
                            "mount it with locks (NFS: not nolock), or use another --run-dir")
    return "a second process is refused"


def files(job):
    """Rank 0 holds a connection to every process."""
    world, hard = job.high * processes(job), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 4 * world + 23:
        raise UserError(f"{world} processes need {4 * world + 23} open files, "
                        f"but this machine allows each of them {hard}\n"
                        "raise the hard limit (ulimit -Hn, LimitNOFILE), or start fewer processes")
    return f"{hard if hard != resource.RLIM_INFINITY else 'any number of'} open files for {world} processes"


def processes(job):
    """On each machine; a word such as gpu stands for the number that torchrun will find."""
    return int(job.each) if job.each.isdecimal() else max(1, gpus()) if job.each != "cpu" else os.cpu_count()


def gpus():
    return importlib.import_module("torch").cuda.device_count()


def versions(job):
    """The data can be read, the net can be built, torchrun knows its flags; also fills what is compared."""
    from torch.distributed.run import get_args_parser

    from common.checkpoint import versions as found
    from common.data import load_data
    from common.models import build_model
    with contextlib.redirect_stderr(open(os.devnull, "w")) as nowhere, nowhere:
        try:
            get_args_parser().parse_args([*job.agent, "SCRIPT"])
        except SystemExit:
            raise UserError(f"torchrun does not take {' '.join(job.agent)}\ntorchrun --help") from None
    if 0 < gpus() < processes(job) and job.opts.device != "cpu" and not job.opts.devices:
        raise UserError(f"{processes(job)} processes on this machine but {gpus()} GPUs are visible\n"
                        "a smaller --nproc_per_node, or --device cpu")
    here = SimpleNamespace(once_per_node=lambda _, find: find())
    job.data = load_data(replace(job.opts, download=False), here)
    net = build_model(replace(job.opts, init_from=""), job.data)
    own = sum(tensor.numel() * tensor.element_size() for tensor in net.state_dict().values())
    moments = {"sgd": bool(job.opts.momentum)}.get(job.opts.optimizer, 2) + bool(job.opts.ema_decay)
    job.size = own * (1 + moments)
    job.facts = found(job.opts, job.data.fingerprint)
    return ", ".join(f"{key} {value}" for key, value in job.facts.items())


def room(job):
    """For all checkpoints that are kept, and the one that is being written."""
    kept = [path for path in job.opts.run_dir.glob("checkpoints/*/*") if path.is_file()]
    needed = job.size * (job.opts.keep + 1) - sum(path.stat().st_size for path in kept)
    free = shutil.disk_usage(job.folder).free
    if free < needed:
        raise UserError(f"{job.opts.run_dir}: {megabytes(free)} are free, {job.opts.keep} + 1 checkpoints of "
                        f"{megabytes(job.size)} need {megabytes(needed)}\nmake room, or a smaller --keep")
    return f"{megabytes(free)} free for {job.opts.keep} + 1 checkpoints of about {megabytes(job.size)}"


def shared_memory(job):
    """Loading processes pass samples through /dev/shm, two shares each."""
    if not job.data or job.data.train.in_memory or not job.opts.workers:
        return "no loading processes"
    share = math.ceil(job.opts.global_batch_size / processes(job)) * math.prod(job.data.sample_shape) * 4
    needed, free = 2 * job.opts.workers * processes(job) * share, shutil.disk_usage("/dev/shm").free
    if free < needed:
        raise UserError(f"/dev/shm has {megabytes(free)} free, loading processes need {megabytes(needed)}\n"
                        "--workers 0, or a larger /dev/shm (docker run --shm-size=8g)")
    return f"/dev/shm has {megabytes(free)} free of {megabytes(needed)} that loading processes need"


def grace(job):
    """After a signal, a process is killed at some time: the state must be written by then."""
    given = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", GRACE_SECONDS))
    needed = COPIES * job.size / max(job.speed, 1)
    if needed > given:
        raise UserError(f"saving at a stop may take {needed:.0f} s at {megabytes(job.speed)}/s, "
                        f"and the launcher kills after {given:.0f} s\n"
                        "a faster --run-dir, or a larger TORCH_ELASTIC_SHUTDOWN_TIMEOUT (and notice period)")
    return f"saving at a stop takes up to {needed:.1f} s of {given:.0f} s"


def existing(path):
    return next(place for place in (path, *path.absolute().parents) if place.is_dir())


def megabytes(size):
    return f"{size / 1e6:,.0f} MB"


HERE = (run_folder, locks, files, versions, room, shared_memory, grace)
CHECKS = (address, name, port, *HERE, machines), HERE  # of several machines, of one


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
