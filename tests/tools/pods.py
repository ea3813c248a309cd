"""Pods on this machine: launch/kubernetes/*.yaml, and a container's command as a kubelet runs it.

A pod has namespaces of its own (PID, network, mount, host name, user), its command is process 1 under a uid
without a name, the root is read-only, /dev/shm has 64 MB unless the manifest mounts more, and names are what
the file of names says at that moment. Needs root, util-linux 2.38 and iproute2.
"""
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from jobs import ROOT, children, until

# A bracket or comma, a text in double or single quotes, a plain one up to what ends it, a colon.
FLOW = re.compile(r"""\s*(?:([{}\[\],])|"([^"]*)"|'([^']*)'|"""
                  r"""([^\s{}\[\],:][^{}\[\],]*?)(?=\s*(?:[{}\[\],]|:\s|$))|:)""")
# Makes a root of its own and goes in: $1 folder, $2 hosts, $3 volume, $4 size of /dev/shm, $5 host name, then
# variables and the command.
BEGIN = r"""
set -e
new=$1 hosts=$2 volume=$3 shm=$4; hostname "$5"; shift 5
mount --make-rprivate /
ip link set lo up 2>/dev/null || true  # a network that a test made has it up already
mount -t tmpfs tmpfs "$new"
for place in /*; do
    [ -L "$place" ] && cp -P "$place" "$new$place" && continue
    case $place in /proc | /tmp | /app | /runs) continue ;; esac
    [ -d "$place" ] && mkdir "$new$place" && mount --rbind "$place" "$new$place"
done
mkdir "$new/proc" "$new/tmp" "$new/app" "$new/runs"
mount -t proc proc "$new/proc"
mount -t tmpfs tmpfs "$new/tmp"
mount --rbind "$APP" "$new/app"
mount --bind "$volume" "$new/runs"
mount --bind "$hosts" "$new/etc/hosts"
mount -t tmpfs -o "size=$shm" tmpfs "$new/dev/shm"
for place in "$new/app" "$new/etc" "$new/usr" "$new"; do mount -o remount,bind,ro "$place"; done
cd "$new"
pivot_root . tmp
umount -l /tmp
cd /app
exec unshare --user --map-user=10001 --map-group=10001 setpriv --no-new-privs env -i "$@"
"""


# ---- the part of YAML that the manifests use ---------------------------------------------------------
def manifests(path):
    """The objects of one file."""
    return [block(rows(text)) for text in re.split(r"^---\n", path.read_text(), flags=re.MULTILINE)]


def rows(text):
    lines = [re.sub(r"(^|\s)#.*", "", line).rstrip() for line in text.splitlines()]
    return [(len(line) - len(line.lstrip()), line.lstrip()) for line in lines if line]


def block(rows):
    first, text = rows[0]
    if text.startswith("- "):
        items = []
        for indent, text in rows:
            if indent == first:
                items.append([(indent + 2, text[2:])])
            else:
                items[-1].append((indent, text))
        return [block(item) for item in items]
    if not re.match(r"[\w./-]+:( |$)", text):
        return flow(text)
    found = {}
    for indent, text in rows:
        if indent == first and not text.startswith("- "):
            key, _, rest = text.partition(":")
            found[key] = [(indent, rest.strip())] if rest else []
        else:
            found[key].append((indent, text))
    inline = {key for key, inner in found.items() if inner[0][0] == first and inner[0][1][:2] != "- "}
    return {key: flow(inner[0][1]) if key in inline else block(inner) for key, inner in found.items()}


def flow(text):
    if text[0] not in "{[\"'":
        return plain(text)
    tokens = [next(((i, part) for i, part in enumerate(match.groups()) if part is not None), (9, ":"))
              for match in FLOW.finditer(text)]
    return value(tokens)


def value(tokens):
    kind, text = tokens.pop(0)
    if kind:
        return plain(text) if kind == 3 else text
    found = {} if text == "{" else []
    while tokens[0] not in ((0, "}"), (0, "]")):
        one = value(tokens)
        if text == "{":
            tokens.pop(0)  # the colon
            found[one] = value(tokens)
        else:
            found.append(one)
        if tokens[0] == (0, ","):
            tokens.pop(0)
    tokens.pop(0)
    return found


def plain(text):
    return {"true": True, "false": False}.get(text, int(text) if re.fullmatch(r"\d+", text) else text)


# ---- pods --------------------------------------------------------------------------------------------
def why_not():
    """Why no pod can be made here; empty if one can."""
    if os.geteuid():
        return "pods need root"
    if not all(map(shutil.which, ("ip", "unshare", "setpriv", "pivot_root"))):
        return "pods need iproute2 and util-linux"
    made = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "unshare", "--user",
            "--map-user=10001", "--map-group=10001", "true"]
    done = subprocess.run(made, capture_output=True, timeout=60)
    return "no namespaces can be made here" if done.returncode else ""


class Pod:
    """One container of a pod template, started; `fields` are what fieldRef finds."""

    def __init__(self, folder, network, name, spec, volume, fields, change=(), command=None, **env):
        container, = spec["containers"]
        self.out, self.name = folder / f"{name}-{len(list(folder.glob(f'{name}-*')))}", name
        self.out.mkdir()
        variables = env | {one["name"]: one.get("value") or fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
                           for one in container.get("env", ())}
        words = [expand(word, variables) for word in command or container["command"]]
        for old, new in change:
            assert old in words, (old, words)
            words[words.index(old):words.index(old) + 1] = new
        sizes = [one["emptyDir"].get("sizeLimit", "64Mi") for one in spec["volumes"] if one["name"] == "shm"]
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        given = {"PATH": path, "KUBERNETES_SERVICE_HOST": "10.96.0.1", "OMP_NUM_THREADS": "1",
                 "TESTS_TOKEN": os.environ["TESTS_TOKEN"], "PYTHONDONTWRITEBYTECODE": "1", **variables}
        (self.out / "root").mkdir()
        self.hosts = self.out / "hosts"  # a kubelet writes the pod's own name there; others: the name service
        self.hosts.write_text(f"127.0.0.1 localhost\n{fields.get('status.podIP', '127.0.0.1')} {name}\n")
        with open(self.out / "log", "wb") as log:
            self.process = subprocess.Popen(
                [*network, "unshare", *([] if network else ["--net"]), "--user", "--map-root-user", "--mount",
                 "--uts", "--pid", "--fork", "--kill-child", "sh", "-c", BEGIN, "sh", self.out / "root",
                 self.hosts, volume, (sizes or ["64Mi"])[0].removesuffix("i").lower(), name,
                 *(f"{key}={text}" for key, text in given.items()), *words],
                env=os.environ | {"APP": str(ROOT)}, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    @property
    def log(self):
        return (self.out / "log").read_text(errors="replace")

    @property
    def one(self):
        """The pid of process 1, seen from outside; 0 until it runs the command."""
        first = (*children(self.process.pid), 0)[0]
        try:
            with open(f"/proc/{first}/cmdline", "rb") as file:
                return first if b"python" in file.read() else 0
        except OSError:
            return 0

    @property
    def hears(self):
        """Whether process 1 has a handler for SIGTERM; without one the kernel drops the signal."""
        try:
            caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{self.one}/status").read_text())[1]
        except OSError:
            return False
        return int(caught, 16) >> signal.SIGTERM - 1 & 1

    def learns(self, name, address):
        with open(self.hosts, "a") as file:
            file.write(f"{address} {name}\n")

    def terminate(self):
        os.kill(until(lambda: self.one, f"{self.name} to run", 20), signal.SIGTERM)

    def wait(self, deadline=60):
        try:
            return until(lambda: self.process.poll() is not None and (self.process.returncode,), self.name,
                         deadline)[0]
        except AssertionError:
            raise AssertionError(f"{self.name} did not end within {deadline} s\n{self.log}") from None

    def kill(self):
        self.process.kill()  # the whole pod goes with it
        self.process.wait()


def expand(word, variables):
    """$(NAME) as a kubelet expands it."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), str(word))
