"""Sends a training SIGTERM when this machine will be taken away, so that it saves and leaves with 143.

    python launch/notice.py launch/local.sh --epochs 10
    python launch/notice.py --file /run/leave python launch/torchrun.py --nproc_per_node=8 train_ddp.py

AWS, GCP and Azure announce it at an address inside the machine, 30 seconds to 15 minutes ahead; a file that
appears (--file) announces it too. The command takes the place of this process, so that its signals and its
exit code stay its own; a child of it watches and ends with it. Slurm sends the signal itself, and so does
Kubernetes where something drains the node.
"""

import argparse
import json
import os
import select
import shutil
import signal
import sys
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

from common.errors import ready_streams, say  # noqa: E402

ADDRESS = os.environ.get("NOTICE_ADDRESS", "http://169.254.169.254")  # the same in all three clouds
EVERY_SECONDS = float(os.environ.get("NOTICE_SECONDS", 2))
ANSWER_SECONDS = 2
LONGEST_ANSWER_BYTES = 1_000_000
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy knows nothing of this machine


def ask(path, headers, method="GET"):
    request = urllib.request.Request(f"{ADDRESS.rstrip('/')}/{path}", headers=headers, method=method)
    with DIRECT.open(request, timeout=ANSWER_SECONDS) as answer:
        return answer.read(LONGEST_ANSWER_BYTES).decode()


def aws():
    token = ask("latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    try:
        notice = ask("latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    except HTTPError:  # 404: there is none
        return ""
    return f"AWS will {json.loads(notice)['action']} this machine"


def gcp():
    preempted = ask("computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return "GCP takes this machine away" if preempted.strip() == "TRUE" else ""


def azure():
    """Ask Azure: it may announce the end of another machine of the same set, or a pause (Freeze)."""
    ends = ("Preempt", "Terminate", "Reboot", "Redeploy")
    metadata = {"Metadata": "true"}
    events = json.loads(ask("metadata/scheduledevents?api-version=2020-07-01", metadata))["Events"]
    name = ask("metadata/instance/compute/name?api-version=2021-02-01&format=text", metadata).strip()
    for event in events:
        if event["EventType"] in ends and name in event["Resources"]:
            return f"Azure announces a {event['EventType']} of this machine"
    return ""


CLOUDS = {"AWS": aws, "GCP": gcp, "Azure": azure}


def main():
    ready_streams()  # `process` must not get the number of a closed one
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, help="this file announces it as soon as it exists")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    words = parser.parse_args()
    command = words.command
    if not command or not shutil.which(command[0]):
        parser.error(f"no program {' '.join(command)}")
    process = os.pidfd_open(os.getpid())
    if os.fork():
        os.execvp(command[0], command)  # closes its own `process`
    os.setsid()  # Ctrl-C is for the command
    watch(process, words.file)


def watch(process, file):
    """Watch until the process has ended, or is asked to."""
    reported = set()
    while not select.select([process], [], [], EVERY_SECONDS)[0]:
        cloud, notice = ("", f"{file} is there") if file and file.exists() else look()
        if notice:
            signal.pidfd_send_signal(process, signal.SIGTERM)
            say(f"notice: {notice}: SIGTERM to the training", sys.stderr)
            return
        if cloud not in reported:
            reported.add(cloud)
            nobody = f"no cloud answers at {ADDRESS}: {f'only {file}' if file else 'nothing'} is watched"
            say(f"notice: {f'{cloud} answers' if cloud else nobody}", sys.stderr)


def look():
    """Return (the cloud that answers, what it announces), each empty if there is none."""
    for name, cloud in CLOUDS.items():
        # another cloud's words, or none at all
        with suppress(OSError, HTTPException, ValueError, KeyError, TypeError):
            return name, cloud()
    return "", ""


if __name__ == "__main__":
    main()
