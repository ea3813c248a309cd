"""Lives in a row that began on one step, and did not get beyond it: another one would not, either."""

from itertools import chain

from common.errors import UserError
from common.ledger import named
from common.sampler import ElasticSampler

FAILED_LIVES = 3  # in a row: they began on one step and ended with an error
KILLED_LIVES = 10  # in a row on one step: all made steps, and were killed before they saved
SAMPLES_NAMED = 512  # in an error
ENDS_A_ROW = {"refused", "done"}  # events: a life that has one ends the row
FAILURES = {"error", "hang"}  # events


def refuse_without_progress(lives, state):
    """Exit with code 5 if too many lives in a row have begun on this step and ended; the newest one first.

    The refusal ends the row: the next start may try as often again. A step that was saved and then withdrawn
    is no progress: the next life began on the same step.
    """
    progress = state.progress
    failed = 0
    row = []
    for life in lives:
        names = {event["event"] for event in life}
        # the error of one rank stops the others
        ended = names & ENDS_A_ROW or "stop" in names and not names & FAILURES
        if ended or life[0]["step"] != progress.step:
            break
        row.append(life)
        if names & FAILURES or "first_step" not in names:
            failed += 1
    too_many = failed >= FAILED_LIVES or len(row) >= KILLED_LIVES
    complete = progress.finished and not progress.evaluation_due
    if complete or not too_many:
        return
    errors = [event["why"] for event in named(chain(*reversed(row)), "error")]
    first = [*errors, "killed, no error was noted"][0]
    order = ElasticSampler(progress.samples, state.opts.global_batch_size, seed=progress.order[1])
    order.set_epoch(progress.epoch, progress.samples if progress.finished else progress.position)
    samples = ", ".join(map(str, next(iter(order), [])[:SAMPLES_NAMED]))
    raise UserError(
        f"no progress in {len(row)} lives on step {progress.step + 1}; the first error: {first}\n"
        f"its samples: {samples or 'none, it is an evaluation'} (of epoch {progress.epoch + 1})\n"
        "mend the cause (a bad sample? too little memory?), then start again",
        code=5,
    )
