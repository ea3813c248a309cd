"""Every evaluation is in metrics.jsonl once, wherever the process that should have written it died."""

import json
import signal

from ranks import fork_ranks
from test_bitwise import CNN, left_by, life, options

import common.elastic as house
import train_ddp

# Evaluated at the end of an epoch, step 5, and in mid-epoch, where --max-steps ends the run.
PLAIN = CNN | {"virtual_ranks": 0, "epochs": 2, "max_steps": 8, "save_every": 8}


def struck(world, script, opts, step, due, killed):
    """A life whose rank 0 dies at the evaluation of `step`: where it is due, or when it is made and not yet
    written.
    """

    def strike(at):
        if world.rank == 0 and at == step:
            if killed:
                signal.raise_signal(signal.SIGKILL)
            raise RuntimeError("struck")

    def evaluate(model, split, state, *more):
        if due:
            strike(state.progress.step)
        return real_evaluate(model, split, state, *more)

    def write(log, record, metrics):
        if not due:
            strike(record["step"])
        real_write(log, record, metrics)

    real_evaluate = house.evaluate
    real_write = house.Log.evaluation
    house.evaluate = evaluate
    house.Log.evaluation = write
    return life(world, script, opts)


def test_each_evaluation_is_written_once_whenever_its_writer_dies(tmp_path):
    def run(folder, *strike):
        lived = struck if strike else life
        may_die = range(2) if strike else ()
        return fork_ranks(2, lived, train_ddp, options(folder, PLAIN), *strike, may_die=may_die)[0]

    run(tmp_path / "whole")
    whole = left_by(tmp_path / "whole")
    assert [line["step"] for line in map(json.loads, whole[1].splitlines()) if "val_acc" in line] == [5, 8]
    for killed, code in ((True, -9), (False, 2)):
        folder = tmp_path / f"killed {killed}"
        for step in (5, 8):
            assert run(folder, step, True, killed) == run(folder, step, False, killed) == code
        run(folder)
        assert left_by(folder) == whole, folder
