"""A server of S3's protocol (moto) as a process of its own: `with server() as s3`."""

import contextlib
import os
import re
import subprocess
import sys
import urllib.request

BUCKET = "spot"
SIGNED = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=c"


class S3:
    """What a test sees of it."""

    def __init__(self, address):
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

    def ask(self, method, path, data=None):
        headers = {"Authorization": SIGNED}
        request = urllib.request.Request(f"{self.address}/{BUCKET}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    def names(self, run):
        """Of the checkpoints that have a manifest."""
        listed = self.ask("GET", f"?list-type=2&prefix={run}/")
        return re.findall("<Key>[^<]*checkpoints/([^<]*)/manifest.json</Key>", listed)


@contextlib.contextmanager
def server():
    command = [sys.executable, __file__]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield S3(process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def serve():
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = DomainDispatcherApplication(create_backend_app)
    listener = make_server("127.0.0.1", 0, app, threaded=True)
    print(f"http://127.0.0.1:{listener.server_port}", flush=True)
    listener.serve_forever()


if __name__ == "__main__":
    os.environ.setdefault("MOTO_S3_CUSTOM_ENDPOINTS", "")
    serve()
