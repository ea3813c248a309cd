"""What becomes of ranks that differ: this life ends, and the next one begins where all of them agreed."""

from common.checkpoint import checkpoints
from common.errors import UserError, say


def refuse_replicas(store, odd):
    """End this life: the weights of the `odd` ranks are not those of the first."""
    step = store.state.progress.step
    agreed = store.saver.agreed
    life_begins = agreed < 0
    if life_begins and not step:
        roll_back(
            store,
            UserError(
                f"model {store.opts.model}: the ranks have made different weights\n"
                "make them from --seed alone, not from the rank, the process or the time"
            ),
        )
    back_to = "the newest checkpoint" if life_begins else f"step {agreed}, where all agreed"
    roll_back(
        store,
        RuntimeError(
            f"step {step}: the weights of the replicas differ (ranks {odd} from the first); "
            f"going back to {back_to}. Something else than the "
            "optimizer's step on the summed gradient has changed them: a second optimizer, a line "
            "that writes to them, other versions of a library, or a device that computes wrongly"
        ),
    )


def roll_back(store, error):
    """End this life: this state is not to be believed, nor what was saved since all ranks agreed."""
    if isinstance(error, UserError):
        store.state.invalidate(error)
    store.saver.wait()
    agreed = store.saver.agreed
    gone = []
    for step, folder in checkpoints(store.opts.run_dir):
        if store.owns and step > agreed >= 0 and store.writer.put_aside(folder):
            say(f"checkpoints/{folder.name}: saved after the ranks last agreed (step {agreed}); put aside")
            gone.append(folder.name)
    if store.saver.bucket and gone:
        store.saver.bucket.end(*gone)
    raise error
