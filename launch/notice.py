"""Sends a training SIGTERM when this machine will be taken away, so that it saves and leaves with 143.

    python launch/notice.py launch/local.sh --epochs 10
    python launch/notice.py --file /run/leave python launch/torchrun.py --nproc_per_node=8 train_ddp.py

AWS, GCP and Azure announce it at an address inside the machine, 30 seconds to 15 minutes ahead; a file that
appears (--file) announces it too. The command takes the place of this process, so that its signals and its
exit code stay its own; a child of it watches and ends with it. `--pid PID` watches for a launcher that runs
already. In Kubernetes and Slurm nothing is needed: they send the signal themselves.
"""
import argparse
import email.utils
import http.client
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
import urllib.request
from datetime import datetime, timezone
from urllib.error import HTTPError

ADDRESS = os.environ.get("NOTICE_ADDRESS", "http://169.254.169.254")  # the same in all three clouds
ANSWER_SECONDS = 2
LONGEST_ANSWER_BYTES = 1_000_000
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy knows nothing of this machine


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pid", type=int, help="watch for this process instead of a command")
    parser.add_argument("--file", help="this file announces it as soon as it exists")
    parser.add_argument("--address", default=ADDRESS, help="of the cloud's answers (default: %(default)s)")
    parser.add_argument("--every", type=float, default=2, help="seconds between two looks")
    parser.add_argument("--before", type=float, default=120,
                        help="send it so many seconds before the announced time, if that is later than now")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    command = given.command[given.command[:1] == ["--"]:]
    if (given.pid is None) == (not command):
        parser.error("either a command or --pid PID")
    if command and not shutil.which(command[0]):
        parser.error(f"no program {command[0]}")
    try:
        process = os.pidfd_open(given.pid or os.getpid())
    except (OSError, OverflowError) as error:
        parser.error(f"--pid {given.pid}: {getattr(error, 'strerror', None) or error}")
    if command and os.fork():
        os.execvp(command[0], command)  # closes its own `process`
    if command:
        os.setsid()  # Ctrl-C is for the command
    threading.Thread(target=watch, args=(given, process), daemon=True).start()
    select.select([process], [], [])    # until it has ended
    sys.stderr.flush()
    os._exit(0)


def watch(given, process):
    """Looks until there is a notice, then sends SIGTERM to the process."""
    clouds, warned = [aws, gcp, azure], False
    while True:
        cloud, notice = look(lambda *request: ask(given.address, *request), clouds)
        if given.file and os.path.exists(given.file):
            notice = given.file, 0
        if notice and notice[1] - time.time() <= given.before:
            say(f"{notice[0]}: SIGTERM to the training")
            signal.pidfd_send_signal(process, signal.SIGTERM)
            return
        if cloud:
            clouds = [cloud]
        elif not warned and not given.file and len(clouds) > 1:
            say(f"no cloud answers at {given.address}; trying again")
            warned = True
        time.sleep(given.every)


def look(ask, clouds):
    """(the cloud that answers, its notice): the notice is None, or what will happen and when."""
    for cloud in clouds:
        try:
            return cloud, cloud(ask)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError):
            pass  # another cloud's words, or none at all
    return None, None


def aws(ask):
    token = ask("latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    try:
        found = json.loads(ask("latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}))
    except HTTPError as error:
        if error.code == 404:  # no notice
            return None
        raise
    when = datetime.strptime(found["time"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    return f"AWS will {found['action']} this machine at {found['time']}", when.timestamp()


def gcp(ask):
    preempted = ask("computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}).strip()
    if preempted not in ("TRUE", "FALSE"):
        raise ValueError(preempted)
    return ("GCP takes this machine away", 0) if preempted == "TRUE" else None


def azure(ask):
    """An announcement may be for another machine of the same set, or for a pause of some seconds (Freeze)."""
    metadata = {"Metadata": "true"}
    events = json.loads(ask("metadata/scheduledevents?api-version=2020-07-01", metadata))["Events"]
    ends = [event for event in events if event["EventType"] in ("Preempt", "Terminate", "Reboot", "Redeploy")]
    own = ask("metadata/instance/compute/name?api-version=2021-02-01&format=text", metadata) if ends else ""
    times = [(email.utils.parsedate_to_datetime(event["NotBefore"]).timestamp() if event["NotBefore"] else 0,
              event["EventType"]) for event in ends if own.strip() in event["Resources"]]
    return (f"Azure: {min(times)[1]} of this machine", min(times)[0]) if times else None


def ask(address, path, headers, method="GET"):
    request = urllib.request.Request(f"{address.rstrip('/')}/{path}", headers=headers, method=method)
    with DIRECT.open(request, timeout=ANSWER_SECONDS) as answer:
        return answer.read(LONGEST_ANSWER_BYTES).decode()


def say(text):
    print(f"notice: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
