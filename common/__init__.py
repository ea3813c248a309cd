"""The map of common/: folders are rooms, and files below carry them.

A room imports only from the floors below it and only through its door (`__init__.py`); rooms of one floor do
not know each other. extras/ stands beside them: an option or a command enters it, no room imports it
(tests/whole/test_house.py checks this, and lists what each room costs).

    replay       the command that makes segments of a run once more, and compares

    extras       what a plain training never imports: more nets and datasets, reports, several devices, ...

    elastic      the loop: epochs, batches, step, evaluation; the three scripts are its first users

    story        what a life says of itself when it begins

    rescue       how a life ends: signals, survivors' save, hangs

    store        who owns the folder of a run, when it saves, what it loads

    training     one step: state, forward, loss, backward, update; and evaluation
    models       nets by name; `load` gives that of a run with its weights

    checkpoint   what lies on the disk: checkpoints that are whole, verified, fenced
    ledger       what a run tells and writes down; a log never stops a training. No torch here
    world        the processes of one life: they meet, agree, compute alike, leave
    data         datasets as batches: the same numbers at any world size

    options      what was asked for: flags, the names they know, the code of a run. No torch here
    sampler      which sample, when; all randomness is a function of a key

    errors       how a mistake reaches a person: once per machine, in three lines, with its exit code

    place        which rank, under which agent, on which machine: the one reader of the launcher's environment
    device       a GPU in one place, and how one waits for it
    sealed       JSON that shows whether a bit of it has changed, and whether this user wrote it
    torch_names  what is used of torch's inside, asked for at the start
"""

import pkgutil

__version__ = "0.5.0"  # .github/CHANGELOG.md says what it changes
__path__ = pkgutil.extend_path(__path__, __name__)  # beside a `common/` of a user's own; see elastic.py
