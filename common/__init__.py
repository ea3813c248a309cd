"""The map of common/: nine rooms on two stones.

A room imports only from the floors below it and only through its door (`__init__.py`); rooms of one floor do not know
each other. tests/ hold it.

    opening      how a script begins and how it ends badly

    rescue       signals in, survivors' checkpoint out; no collectives

    pulse        whether the ranks still move: hangs are named and ended, stragglers named

    pipeline     who carries tensors from stage to stage: threads over devices, or ranks

    flights      slices of a global batch on their way through stages, to the same bits

    stages       a stage, and a pipeline of them

    line         what the ranks of one pipeline hand each other

    spread       a checkpoint of which each rank writes what it owns

    checkpoint   the store on disk: atomic, asynchronous, verified, fenced

    writer       the commit protocol: one checkpoint on the disk, whole or not at all

    restore      the newest checkpoint that anybody has, on every rank

    weights      weights without their checkpoint: from a foreign file, compared between ranks

    pieces       parts of one such file: joined from those of ranks, cut for what a rank owns

    image        the bytes of one safetensors file in one host buffer

    owner        which process writes into which run folder

    identity     what a run is; a restart that contradicts it is refused

    manifest     a checkpoint's folder, and the proof that every byte is the one that was saved

    fence        who may write into a run folder: one job at a time, and of that job only the newest life

    held         a file that a process keeps locked, and in which it is seen to live

    processes    what can be said of a process: who it is, and whether it will ever move again

    files        durable files: written aside, synced, renamed, read back

    cuts         where a net may be cut into stages, measured and balanced

    training     one step: state, forward, loss, backward, update; and evaluation

    ledger       what a run tells and writes down; a log never stops a training. No torch here
    world        the processes of one life: they meet, agree, compute alike, leave
    models       the registry of nets
    data         datasets as batches: the same numbers at any world size

    options      what was asked for: flags, the launcher's environment, a user's own code. No torch here
    sampler      which sample, when; all randomness is a function of a key

    errors       how a mistake reaches a person: once per machine, in three lines, with its exit code
"""
