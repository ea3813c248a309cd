"""What a checkpoint says and what is not so any more: another dataset, an evaluation without a checkpoint."""

from common.checkpoint import best_of
from common.errors import say
from common.world import gather


def take_over(state, world, facts, kept, choices, owns):
    """Look whether what was saved is still so; call it on every rank. `kept` are the run's own steps.

    If the best evaluation has no checkpoint in this run, the best one that has one counts. If another
    dataset's order was saved, the epoch begins again.
    """
    progress = state.progress
    best = progress.best["step"]
    if best and best not in kept:  # its save failed, or rank 0 died in it; or another run has it
        earlier = [choice for choice in choices if choice[0] <= progress.step]
        known = gather(world, best_of(earlier) if owns else {})
        progress.best = next(filter(None, known), {"step": progress.step})
        if owns:
            counts = progress.best["step"]
            say(f"this run has no checkpoint of step {best}, the best one: step {counts} counts")
    if owns and progress.position < facts["position"]:
        say(
            f"step {progress.step} was saved at position {facts['position']:,} of other "
            f"data or another order; the epoch begins again with {progress.samples:,} samples"
        )
