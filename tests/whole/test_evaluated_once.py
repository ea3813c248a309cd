"""Every evaluation is in metrics.jsonl once, wherever the process that should have written it died."""

import json
import signal

import pytest
from ranks import fork_ranks
from test_bitwise import CNN, left_by, life, options

import common.elastic as house
import train_ddp
import train_dp
import train_mp

TWO = ("cpu", "cpu")
SCRIPTS = {
    "ddp": (train_ddp, 2, {}),
    "dp": (train_dp, 1, {"script": "dp", "devices": TWO}),
    "mp": (train_mp, 1, {"script": "mp", "devices": TWO}),
}
# Evaluated at the end of an epoch, step 5, and in mid-epoch, where --max-steps ends the run.
PLAIN = CNN | {"virtual_ranks": 0, "epochs": 2, "max_steps": 8, "save_every": 8}


def struck(world, script, opts, step, where, how):
    """A life whose rank 0 dies at the evaluation of `step`: before it is made, or when it is made and not yet
    written.
    """

    def strike(at):
        if world.rank == 0 and at == step:
            if how == "killed":
                signal.raise_signal(signal.SIGKILL)
            raise RuntimeError("struck")

    evaluate = house.evaluate

    class Mortal(house.Log):
        def evaluation(self, record, metrics):
            strike(record["step"])
            super().evaluation(record, metrics)

    def evaluate_or_die(model, split, state, world, task):
        strike(state.progress.step)
        return evaluate(model, split, state, world, task)

    if where == "made":
        house.Log = Mortal
    else:
        house.evaluate = evaluate_or_die
    return life(world, script, opts)


def files_of(folder):
    newest = max((folder / "checkpoints").iterdir())
    return (folder / "metrics.jsonl").read_bytes(), newest.stat().st_ino


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_evaluation_is_written_once_whenever_its_writer_dies(tmp_path, name):
    script, world, extra = SCRIPTS[name]

    def run(folder, *strike):
        opts = options(folder, PLAIN | extra)
        return fork_ranks(
            world, struck if strike else life, script, opts, *strike, may_die=range(world) if strike else ()
        )[0]

    run(tmp_path / "whole")
    whole = left_by(tmp_path / "whole")
    assert [line["step"] for line in map(json.loads, whole[1].splitlines()) if "val_acc" in line] == [5, 8]
    for how, code in (("killed", -9), ("raised", 2)):
        folder = tmp_path / how
        for step in (5, 8):
            assert run(folder, step, "due", how) == run(folder, step, "made", how) == code
        run(folder)
        assert left_by(folder) == whole, how
        before = files_of(folder)
        run(folder)
        assert files_of(folder) == before
