"""Fingerprints of the state: whether the replicas still agree, and what a later recomputation compares with.

If replicas differ, what was saved since they agreed may be a diverged one's.
"""
from common.checkpoint.manifest import checkpoints
from common.errors import UserError
from common.world import fingerprint_of, odd_ranks


def agree(store, state):
    """Compares all replicas; RuntimeError if they differ: the run restarts where all agreed."""
    if store.world.size == 1:
        return
    odd = odd_ranks(store.world, [fingerprint_of(state.tensors()["model"]), state.step])
    if odd is not None:
        state.half_updated = True
        _withdraw(store)
        rank = f"rank {odd or 'any'}"
        raise RuntimeError(
            f"step {state.step}: the weights of {rank} differ from the others; "
            f"going back to step {store.agreed}, where all agreed" if store.agreed is not None else
            f"step {state.step}: {rank} starts with other weights than the others")
    if store.agreed is None or not store.opts.cross_check:  # which finds more than equal weights show
        store.agreed = state.step


def trust(store, state, fact):
    """After a --cross-check: what was saved before it is trusted, or if `fact` names a rank, the run ends."""
    if not fact:
        store.agreed = state.step
        return
    state.half_updated = True
    _withdraw(store)
    state.verdict = UserError(f"{fact}; going back to step {store.agreed} or before, on which ranks agreed\n"
                              "keep the run off that device, then start the same command again", code=7)
    raise state.verdict


def note_digest(store):
    """--digest-every: a fingerprint of weights and optimizer, in the ledger."""
    state, every = store.state, store.opts.digest_every
    if every and store.fence and store.ledger and state.step % every == 0:
        sums = {part: fingerprint_of(tensors) for part, tensors in state.tensors().items()}
        store.ledger.event("digest", step=state.step, **sums)


def _withdraw(store):
    """Puts aside what was saved since all ranks agreed."""
    store.wait()
    for step, folder in checkpoints(store.root) if store.fence and store.agreed is not None else ():
        if step > store.agreed:
            store.report(f"checkpoints/{folder.name}: saved after the ranks last agreed "
                         f"(step {store.agreed}); put aside")
            store.writer.put_aside(folder)
