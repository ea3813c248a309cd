"""The map of common/: ten rooms on two stones.

A room imports only from the floors below it and only through its door (`__init__.py`); rooms of one floor do
not know each other (tests/whole/test_house.py checks this).

    replay       makes steps of a run once more, and compares: verify, step, diff

    pipeline     a net cut into stages, over devices or ranks; only train_mp.py comes here
    elastic      the loop of train_ddp.py as an iterator, for a script of one's own

    training     one step: state, forward, loss, backward, update; and evaluation
    checkpoint   the store on disk: atomic, asynchronous, verified, fenced
    rescue       how a life begins and how it ends: signals, survivors' save, hangs

    ledger       what a run tells and writes down; a log never stops a training. No torch here
    world        the processes of one life: they meet, agree, compute alike, leave
    models       the registry of nets
    data         datasets as batches: the same numbers at any world size

    options      what was asked for: flags, the launcher's environment, a user's own code. No torch here
    sampler      which sample, when; all randomness is a function of a key

    errors       how a mistake reaches a person: once per machine, in three lines, with its exit code
"""
