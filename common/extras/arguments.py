"""Arguments of Elastic in place of flags: which take effect, and the options that they make."""

from common.errors import UserError, did_you_mean
from common.extras.own_data import check_net
from common.options import Options, begin_life, flag_of, read_arguments

TAKEN = (  # fields of Options that take effect in a script of one's own
    "accept_data_change amp audit bad_samples best channels_last check_every clip_grad_norm copy_to "
    "cross_check debug device digest_every ema_decay epochs eval_every global_batch_size hang_timeout "
    "in_flight keep keep_every log_every max_steps micro_batch_size patience progress resume run_dir "
    "save_every save_seconds seed tensorboard tf32 threads virtual_ranks workers"
).split()


def options_of(run):
    """Return the options of a loop of one's own; the rates are the loop's, unless it has a schedule."""
    begin_life()
    for name in run.given:
        if name not in TAKEN:
            raise UserError(
                f"Elastic: {name} cannot take effect in a loop of your own{did_you_mean(name, TAKEN)}\n"
                "the script has the net, the optimizer and the loss"
            )
    rate = float(max(group["lr"] for group in run.optimizer.param_groups))
    if run.schedule:
        for group in run.optimizer.param_groups:
            group["scale"] = float(group["lr"]) / (rate or 1.0)
    facts = {
        "task": "the script",
        "lr": rate,
        "model": type(run.net).__name__,
        "dataset": type(run.sets[0]).__name__ + ("" if run.shuffled else " in its order"),
        "optimizer": type(run.optimizer).__name__.lower(),
    }
    opts = read_arguments(words_of(run.given), facts)
    check_net(run.net, opts.model)
    return opts


def words_of(given):
    """Return these arguments as the words of a command line, which are read and checked as flags are."""
    words = []
    for name, value in given.items():
        if isinstance(value, bool):
            words += [flag_of(name)] * (value != getattr(Options, name))
        elif value is not None:
            words.append(f"{flag_of(name)}={value}")
    return words


def in_arguments(error):
    """Return the error with names of arguments in place of flags."""
    text = str(error)
    for name in sorted(TAKEN, key=len, reverse=True):  # keep_every before keep
        text = text.replace(f"--{name.replace('_', '-')}", name)
    return UserError(text, error.code)
