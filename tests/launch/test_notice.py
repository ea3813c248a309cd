"""launch/notice.py against a server on loopback that speaks as the clouds' metadata servers do."""

import contextlib
import json
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from jobs import ROOT, children, free_port, state, until

NOTICE = ROOT / "launch/notice.py"
# Says when it can be asked to leave; leaves with 143 when it is asked.
TRAINING = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "
    "print('trains', flush=True); signal.sigtimedwait([], 60) or signal.pause()"
)


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        code, text = self.server.dialect(self)
        self.server.asked += 1
        self.send_response(code)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(text.encode())

    do_PUT = do_GET

    def log_message(self, *_):
        pass


def aws(request):
    """As AWS documents it: a token by PUT, then 404 until there is a notice; 401 without the token."""
    if request.path == "/latest/api/token":
        known = request.command == "PUT" and request.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        return (200, "TOKEN==") if known else (405, "")
    if request.headers["X-aws-ec2-metadata-token"] != "TOKEN==":
        return 401, ""
    if request.path != "/latest/meta-data/spot/instance-action" or not request.server.notice:
        return 404, "<html>not found</html>"
    return 200, '{"action": "terminate", "time": "2026-11-23T08:00:00Z"}'


def gcp(request):
    if request.headers["Metadata-Flavor"] != "Google":
        return 403, ""
    if request.path != "/computeMetadata/v1/instance/preempted":
        return 404, ""
    return 200, str(request.server.notice).upper()


def azure(request, machine="vm_1"):
    if request.headers["Metadata"] != "true":
        return 400, ""
    if request.path.startswith("/metadata/instance/compute/name?api-version="):
        return 200, "vm_1"
    if not request.path.startswith("/metadata/scheduledevents?api-version="):
        return 404, ""
    event = {"EventType": "Preempt", "ResourceType": "VirtualMachine", "Resources": [machine]}
    return 200, json.dumps({"DocumentIncarnation": 1, "Events": [event] * request.server.notice})


@pytest.fixture
def cloud():
    """Starts a metadata server; `notice`: whether it announces an end, `asked`: how often it was asked."""
    with contextlib.ExitStack() as stack:

        def begin(dialect):
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Answer))
            server.dialect = dialect
            server.notice = False
            server.asked = 0
            server.address = f"http://127.0.0.1:{server.server_port}"
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            stack.callback(server.shutdown)
            return server

        yield begin


@pytest.fixture
def watched(jobs):
    """Starts a training, under notice.py or alone, and waits until it trains."""

    def begin(*words, address="", **env):
        env |= {"NOTICE_SECONDS": "0.02", "NOTICE_ADDRESS": address}
        job = jobs.start(*words, "-c", TRAINING, cold=True, **env)
        until(lambda: "trains\n" in job.output, "the training")
        return job

    return begin


@pytest.mark.parametrize(
    "dialect, first, last",
    [
        (aws, "notice: AWS answers", "notice: AWS will terminate this machine"),
        (gcp, "notice: GCP answers", "notice: GCP takes this machine away"),
        (azure, "notice: Azure answers", "notice: Azure announces a Preempt of this machine"),
    ],
)
def test_a_clouds_notice_reaches_the_training_as_sigterm_and_its_exit_code_is_kept(
    cloud, watched, dialect, first, last
):
    here = cloud(dialect)
    no_proxy = {"http_proxy": "http://127.0.0.1:1"}  # it is not asked
    job = watched(NOTICE, sys.executable, address=here.address, **no_proxy)
    (watcher,) = children(job.pid)
    until(lambda: here.asked > 6, "some looks")
    assert job.poll() is None and sorted(job.output.splitlines()) == [first, "trains"], "told once"
    here.notice = True
    assert job.ends_with(143).splitlines()[2].startswith(last)
    until(lambda: state(watcher) in "ZX", "the watcher's end")


def test_what_is_no_notice_for_this_machine_ends_nothing(cloud, watched):
    here = cloud(partial(azure, machine="vm_2"))
    here.notice = True
    job = watched(NOTICE, sys.executable, address=here.address)
    until(lambda: here.asked > 12, "some looks")
    assert job.poll() is None
    job.kill()


@pytest.mark.parametrize("words, what", [((), "nothing"), (("--file", "leave"), "only leave")])
def test_where_no_cloud_answers_that_is_told_once_and_a_file_is_heard_all_the_same(
    watched, tmp_path, words, what
):
    nobody = f"http://127.0.0.1:{free_port()}"
    job = watched(NOTICE, *words, sys.executable, address=nobody, cwd=tmp_path)
    told = f"notice: no cloud answers at {nobody}: {what} is watched\n"
    until(lambda: told in job.output, "the first look")
    (tmp_path / "leave").touch()
    if words:
        assert "notice: leave is there: SIGTERM to the training" in job.ends_with(143)
    else:
        job.kill()
        job.wait()
    assert job.output.count("no cloud") == 1
