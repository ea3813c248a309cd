"""Makes steps of a run once more, elsewhere, and compares. Read run.py, then verify.py."""

__all__ = []
