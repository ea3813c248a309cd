"""The fault campaign: python -m tests.chaos --events 200 --seed 1"""

from tests.bench import turns  # noqa: F401  (it finds common, and the tests' own helpers)

EPOCH = 11  # steps of the campaign's trainings
HANG = 15  # seconds until a silent process counts as dead
MISSED = 60  # without a step, until a rank that misses a loading process has left: it looks after 5 s or 10 s
RECOVERY = 150  # seconds within which training must go on after anything


def points_names():
    """{group: [names]} of tests/chaos/points.py, which only a worker can import."""
    files = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
    written = [f"{at}:{file}" for file in files for at in ("write", "unsynced", "synced")]
    return {
        "life": "import join joined restore restored".split(),
        "step": "begin forward backward allreduce step-before step-inside step-torn step-after".split(),
        "save": ["mkdir", *written, *"synced:folder rename renamed synced:root letgo gone".split()],
        "evaluation": "evaluate evaluating evaluated epoch-end epoch-ended".split(),
        "end": "close closed leave left exit".split(),
    }
