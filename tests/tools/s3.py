"""A server of S3's protocol (moto) as a process of its own: `with server(folder) as s3`."""

import contextlib
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

BUCKET = "spot"
SIGNED = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=c"


class S3:
    """What a test sees of it; keys are as `run/options.json`."""

    def __init__(self, folder, address):
        self.folder = folder
        self.address = address
        self.env = {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self.ask("PUT", "", b" ")

    def url(self, run):
        return f"s3://{BUCKET}/{run}"

    def ask(self, method, path, data=None, **headers):
        headers["Authorization"] = SIGNED
        request = urllib.request.Request(f"{self.address}/{BUCKET}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    def get(self, key):
        return self.ask("GET", f"/{key}")

    def put(self, key, data):
        # As it is: without a type urllib calls it a form, and a server reads it as one.
        self.ask("PUT", f"/{key}", data, **{"Content-Type": "application/octet-stream"})

    def keys(self, run):
        return re.findall("<Key>(.*?)</Key>", self.ask("GET", f"?list-type=2&prefix={run}/").decode())

    def names(self, run):
        """Of the checkpoints that have a manifest."""
        found = [re.search("checkpoints/(.*)/manifest.json", key) for key in self.keys(run)]
        return [name[1] for name in found if name]

    def sent(self):
        """The keys that were sent up to here, in order: copies inside of the bucket are no sends."""
        return (self.folder / "sent").read_text().split()


@contextlib.contextmanager
def server(folder):
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield S3(folder, process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def serve(folder):
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = DomainDispatcherApplication(create_backend_app)

    def seen(environ, respond):
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] == "PUT":
            if "HTTP_X_AMZ_COPY_SOURCE" not in environ:
                with open(folder / "sent", "a") as file:
                    print(path.removeprefix(f"/{BUCKET}/"), file=file)
        return app(environ, respond)

    listener = make_server("127.0.0.1", 0, seen, threaded=True)
    print(f"http://127.0.0.1:{listener.server_port}", flush=True)
    listener.serve_forever()


if __name__ == "__main__":
    os.environ.setdefault("MOTO_S3_CUSTOM_ENDPOINTS", "")
    serve(Path(sys.argv[1]))
