"""The fault campaign: python -m tests.chaos --events 200 --seed 1"""
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (2, 1)]     # for common, and for the tests' own helpers


def points_names():
    """{group: [names]} of tests/chaos/points.py, which only a worker can import."""
    files = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
    return {
        "life": ["import", "join", "joined", "restore", "restored"],
        "step": ["begin", "forward", "backward", "allreduce", "step-before", "step-inside", "step-torn", "step-after"],
        "save": ["mkdir", *(f"{at}:{file}" for file in files for at in ("write", "unsynced", "synced")), "folder-synced",
                 "rename", "renamed", "root-synced", "letgo", "gone"],
        "evaluation": ["evaluate", "evaluating", "evaluated", "epoch-end", "epoch-ended"],
        "end": ["close", "closed", "leave", "left", "exit"]}
