from common.options import Options
from common.training.progress import Progress


def make(samples=100, **flags):
    return Progress(Options(**flags), samples)


def train(progress, steps):
    for _ in range(steps):
        progress.count(8)
    return progress


def test_an_epoch_ends_only_when_its_samples_are_all_trained_on():
    progress = train(make(samples=20, max_steps=2, epochs=5, global_batch_size=8), 2)
    assert progress.finished and not progress.epoch_over and progress.evaluation_due
    progress.end_epoch()
    assert (progress.epoch, progress.position) == (0, 16)


def test_an_epoch_that_begins_again_makes_the_run_longer():
    progress = train(make(samples=16, epochs=2, global_batch_size=8), 3)
    progress.end_epoch()
    train(progress, 1)
    assert (progress.epoch, progress.step, progress.planned, progress.total_steps) == (1, 4, 3, 5)
    again = make(samples=24, epochs=2, global_batch_size=8)
    again.load(progress.facts())
    assert (again.step, again.position, again.planned, again.total_steps) == (4, 0, 3, 7)


def test_patience_ends_a_run_at_the_evaluation_that_is_one_too_many_and_a_restart_knows_it():
    flags = {"samples": 16, "global_batch_size": 8, "epochs": 9, "eval_every": 1}
    progress = make(patience=2, **flags)
    for accuracy in (0.5, 0.7, 0.6, 0.7):
        assert not train(progress, 2).finished and progress.evaluation_due
        progress.evaluate({"val_acc": accuracy, "val_loss": 1.0}, "val_acc", 1, "val_loss")
        finished = progress.finished
        progress.end_epoch()
    assert finished and progress.best["step"] == 4 and not progress.evaluation_due
    for patience, ended in ((2, True), (3, False), (0, False)):
        again = make(patience=patience, **flags)
        again.load(progress.facts())
        assert again.finished == ended
