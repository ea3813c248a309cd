"""The map of common/: folders are rooms; sampler, errors, place and device carry them.

A room imports only from the floors below it and only through its door (`__init__.py`); rooms of one floor do
not know each other (tests/whole/test_house.py checks this).

    elastic      the loop of train_ddp.py as an iterator, for a script of one's own
    replay       makes segments of a run once more, and compares

    run          what surrounds a step, once for the three scripts and for elastic
    stages       a net over several devices of one process; only train_mp.py comes here

    rescue       how a life begins and how it ends: signals, survivors' save, hangs

    store        who owns the folder of a run, when it saves, what it loads

    training     one step: state, forward, loss, backward, update; and evaluation
    models       nets by name; `load` gives that of a run with its weights

    checkpoint   what lies on the disk: checkpoints that are whole, verified, fenced
    ledger       what a run tells and writes down; a log never stops a training. No torch here
    world        the processes of one life: they meet, agree, compute alike, leave
    data         datasets as batches: the same numbers at any world size

    rehearsed    which code of a user's own was rehearsed, with which flags

    options      what was asked for: flags, the names they know, functions of a user's own. No torch here
    sampler      which sample, when; all randomness is a function of a key

    errors       how a mistake reaches a person: once per machine, in three lines, with its exit code

    place        which rank, under which agent, on which machine: the one reader of the launcher's environment
    device       a GPU in one place, and how one waits for it
"""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)  # beside a `common/` of a user's own; see elastic.py
