"""A fingerprint of weights and optimizer in the ledger (--digest-every); replay compares with it."""

from common.world import fingerprint_of


def note_digest(state, ledger):
    """Note that of this step, if one is due.

    Tensors go by name: what is remembered comes in the order of its first step, or of a file.
    """
    step = state.progress.step
    if step % state.opts.digest_every == 0:
        sums = {}
        for kind, tensors in state.tensors().items():
            sums[kind] = fingerprint_of(tensors[name] for name in sorted(tensors))
        ledger.event("digest", step=step, **sums)
