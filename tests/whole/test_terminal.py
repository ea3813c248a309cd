"""What a person sees: a first line at once, one bar that nothing tears, and each death in one sentence."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
import threading

from jobs import PACED, ROOT, until, wait_for


class Terminal:
    """Of 200 columns; `text` is all that was written to it."""

    def __enter__(self):
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        self.parts = []
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        return self

    def __exit__(self, *_):
        os.close(self.theirs)
        self.reader.join()
        os.close(self.ours)
        self.text = b"".join(self.parts).decode()

    def _read(self):
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while part := os.read(self.ours, 1 << 16):
                self.parts.append(part)


def test_kills_leave_no_torn_bar_and_a_sentence_for_each_death(jobs, run):
    pids = []
    with Terminal() as terminal:
        (jobs.folder / f"output-{jobs.count + 1}").symlink_to(os.ttyname(terminal.theirs))
        train = [ROOT / "train_ddp.py", *PACED, "--epochs=3", "--run-dir", run]
        job = jobs.start(ROOT / "launch/torchrun.py", "--nproc_per_node=2", *train, TERM="xterm", PACE="0.02")
        for life in (0, 1):
            pids.append(wait_for(run, 6 + 8 * life, life)["pids"][life])
            assert jobs.kill(pids[-1])
        until(lambda: job.poll() is not None, "the end")
    assert job.poll() == 0
    lines = [line.rpartition("\x1b[K")[2].rstrip("\r") for line in terminal.text.split("\n")]
    assert not [line for line in lines if "%|" in line], "the bar has given its line to the result"
    assert lines[-2].startswith("done at step 33: val_acc ") and lines[-1] == "", lines
    assert "100%|██████████| epoch 3/3  step 33/33" in terminal.text
    for rank, pid in enumerate(pids):
        sentence = rf"rank {rank} \(pid {pid}\) was killed by SIGKILL; step \d+ saved by rank {1 - rank}"
        assert sum(bool(re.fullmatch(sentence, line)) for line in lines) == 1, lines
