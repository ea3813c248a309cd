"""The map of common/: one responsibility a file; imports only point up this list.

sampler      which sample, when: stateless order and its split over ranks
gpt          a small GPT over bytes
models       registry of nets; a net may be cut between the children of its nn.Sequential
cuts         where a net may be cut into stages, measured and balanced
restarts     the lives of a run; what lies between two, and how long each part of it took
ledger       append-only JSON lines: lives, saves, rescues, times; the audit and the goodput report
files        durable files: written aside, synced, renamed, read back
metrics      metrics.jsonl, each step once after any number of restarts
log          console line, progress bar, TensorBoard; quiet on other ranks
processes    what can be said of a process: who it is, and whether it will ever move again
tree         the fixed order of additions that gives the same bits at any world size
pinned       what else decides the bits: set, recorded, compared
meeting      the key-value store over which the ranks of one life find each other
world        torchrun's environment, the device, the process group, the few collectives
synthetic    datasets that a program draws
text         a file of text as samples for a language model
pictures     a folder of images: its samples, and all its broken files at once
datasets     registry of datasets; those that live in files, and users' own
download     fetching published datasets, when asked to
workers      processes that fetch samples ahead of the training
data         datasets as batches: the same numbers at any world size
state        everything a checkpoint holds, as named parts; the only place where counters move
held         a file that a process keeps locked, and in which it is seen to live
fence        who may write into a run folder: one job at a time, and of that job only the newest life
manifest     a checkpoint's folder, and the proof that every byte is the one that was saved
identity     what a run is; a restart that contradicts it is refused
owner        which process writes into which run folder
image        the bytes of one safetensors file in one host buffer
pieces       parts of one such file: joined from those of ranks, cut for what a rank owns
weights      weights without their checkpoint: from a foreign file, compared between ranks
agreement    what the ranks of one life tell each other before they train
restore      the newest checkpoint that anybody has, on every rank
writer       the commit protocol: one checkpoint on the disk, whole or not at all
checkpoint   the store on disk: atomic, asynchronous, verified, fenced
spread       a checkpoint of which each rank writes what it owns
buffers      running statistics and counters that move by the same bits at any world size
bitwise      the sum along the tree, over slices and ranks
single       one sample in a forward, which BatchNorm may not take
reduce       how a global batch becomes one gradient
line         what the ranks of one pipeline hand each other
stages       a stage, and a pipeline of them
flights      slices of a global batch on their way through stages, to the same bits
pipeline     who carries tensors from stage to stage: threads over devices, or ranks
evaluate     exact metrics
clock        where the time of a life goes
pulse        whether the ranks still move: hangs are named and ended, stragglers named
rescue       signals in, survivors' checkpoint out; no collectives
environment  what torchrun, Slurm or a person put into the environment; who speaks of errors
flags        what a flag's text may be, and the parser that answers mistakes in three lines
options      flags -> one frozen dataclass; validation
opening      how a script begins and how it ends badly
"""


class UserError(Exception):
    """What a person can mend: fact, values, way out, in at most three lines; the process leaves with `code`."""

    def __init__(self, message, code=2):
        super().__init__(message)
        self.code = code
