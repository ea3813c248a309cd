"""The map of common/: one responsibility a file; imports only point up this list.

sampler     which sample, when: stateless order and its split over ranks
gpt         a small GPT over bytes
models      registry of nets; a net may be cut between the children of its nn.Sequential
ledger      append-only JSON lines: lives, saves, rescues, times; the audit and the goodput report
tree        the fixed order of additions that gives the same bits at any world size
pinned      what else decides the bits: set, recorded, compared
world       torchrun's environment, the device, the process group, the few collectives
data        registry of datasets, one loader
state       everything a checkpoint holds, as named parts; the only place where counters move
checkpoint  the store on disk: atomic, asynchronous, verified
bitwise     the sum along the tree, over slices and ranks
reduce      how a global batch becomes one gradient
pipeline    a net cut into stages over devices
evaluate    exact metrics
log         console line, progress bar, TensorBoard, metrics.jsonl; quiet on other ranks
rescue      signals in, survivors' checkpoint out; no collectives
options     flags -> one frozen dataclass; validation; the run's identity
"""


class UserError(Exception):
    """What a person can mend: fact, values, way out, in at most three lines; the process leaves with `code`."""

    def __init__(self, message, code=2):
        super().__init__(message)
        self.code = code
