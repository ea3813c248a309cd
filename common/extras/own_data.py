"""A user's own data, net and optimizer: what functions in files return, or Elastic was given."""

import inspect

import torch
from torch import Tensor
from torch.utils.data import default_collate

from common.data import Samples, data_of, is_picture, leaves, map_tensors, whole_targets
from common.errors import UserError, blamed, one_line, warn
from common.extras.own_files import call_user
from common.sampler import seeded
from common.training import parts_of

FLOAT32_WHOLE = 1 << 24  # up to there float32 has every whole number
WORDS = (torch.int16, torch.int32, torch.int64)
WANTED = (
    "wanted: (x, y, x_test, y_test), tensors, or (train, test), Datasets with __len__ and __getitem__; "
    "an iterable has no place at which a restart can resume"
)


def own_data(opts, sets):
    """Make the Data of these sets, (train, test); without them of what the function of --dataset returns."""
    with blamed(f"dataset {opts.dataset}", WANTED):
        if not sets:
            return returned_data(opts)
        return data_of(opts, *sets, fingerprint=getattr(sets[0], "fingerprint", ""))


def returned_data(opts):
    """Take what a user's function returns: tensors, or Datasets that may have `classes` and `vocab`."""
    with seeded("dataset"):  # what it draws without a seed is the same on every rank, at every start
        returned = call_user(opts.dataset, opts)
    if len(returned) == 4:
        x, y, x_test, y_test = returned
        vocab = end_of(x, x_test) if x.dtype in WORDS else None
        classes = None if y.is_floating_point() else end_of(y, y_test)
        return data_of(opts, (x, y), (x_test, y_test), classes, vocab)
    train, test = returned
    classes = count_of(inherited(train, "classes"))
    vocab = count_of(inherited(train, "vocab"))
    return data_of(opts, train, test, classes, vocab, getattr(train, "fingerprint", ""))


def as_input(x):
    """Return the tensor as a net accepts it: pictures become 0..1, other numbers float32, indices int64."""
    if is_picture(x):
        return x.float().div_(255)
    if x.is_floating_point() or x.dtype == torch.uint8:
        narrow = x.float()
        loses = (narrow != x) & (x.abs() >= FLOAT32_WHOLE)  # time stamps, ids: others would be one number
        return x if loses.any() else narrow
    return x.long() if x.dtype in WORDS else x


def end_of(*numbers):
    """Return the number that all of these are below."""
    return int(torch.cat(numbers).max()) + 1


def count_of(names):
    """Count these names; a number is a count already, a library's own becomes Python's."""
    return len(names) if hasattr(names, "__len__") else names and int(names)


def inherited(dataset, name):
    """Return an attribute of a dataset, or of the one that a Subset (as random_split makes it) is part of."""
    value = getattr(dataset, name, None)
    if value is None and hasattr(dataset, "dataset"):
        return inherited(dataset.dataset, name)
    return value


class DatasetSamples(Samples):
    """A map-style Dataset; (seed, epoch, id) seeds torch, Python and numpy before each sample.

    Samples become a batch in its own `collate(samples)`, or in torch's default_collate. A Dataset augments
    by itself. With --bad-samples skip a batch lacks the samples that cannot be read; without any it is None.
    """

    one_by_one = True

    def __init__(self, dataset, opts, classes):
        super().__init__(len(dataset), opts, classes)
        self.dataset = dataset
        self.set_epoch = inherited(dataset, "set_epoch")
        self.skip = opts.bad_samples == "skip"
        self.collate = inherited(dataset, "collate") or inherited(dataset, "collate_fn") or default_collate

    def fetch(self, ids, epoch=0, augment=False):
        samples = self._samples(ids, epoch)
        if not samples:
            return None
        which = f"{self.name}: samples {list(ids[:3])}"
        count = 0 if self.skip else len(ids)
        way_out = "samples of one shape, or a method collate(samples) of the dataset, may pad them"
        with blamed(f"{which} are no batch", way_out), seeded(self.seed, epoch, "collate", ids[0]):
            batch = self.collate(samples)  # it may mask words at random
            if batch is None and not self.skip:  # it would count as nothing to train on
                raise ValueError("collate returned None")
            match batch:
                case [x, Tensor() as y] if self.classify:
                    batch = map_tensors(as_input, x), whole_targets(y, count, self.classes, which)
                case {"labels": Tensor() as y} if self.classify:
                    whole_targets(y, count, self.classes, which)
        return batch

    def _samples(self, ids, epoch):
        """Read these samples; with --bad-samples skip without those that cannot be read."""
        way_out = "mend it, or in another run (--run-dir NEW) use --bad-samples skip"
        samples = []
        for id in ids:
            try:
                with blamed(f"{self.name}: sample {id}", way_out), seeded(self.seed, epoch, id):
                    samples.append(self.dataset[id])
            except UserError as error:
                if not self.skip:
                    raise
                warn(f"left out: {one_line(error)}", of_this_rank=True)
                if self.note:
                    self.note("bad_sample", id=id, epoch=epoch, why=one_line(error))
        return samples

    def contents(self):
        """Yield the sizes of numbers in three samples; of one that changes when it is read again nothing."""
        yield str(inherited(self.dataset, "fingerprint") or "").encode()  # a Subset has none of its own
        for id in (0, len(self) // 2, len(self) - 1):
            first, again = self._sizes(id), self._sizes(id)
            if first == again:
                yield first

    def _sizes(self, id):
        """Return mean absolute values, in few digits: the CPU may decide the last bits."""
        sizes = [f"{tensor.double().abs().mean():.3e}" for tensor in leaves(self.fetch([id]))]
        return " ".join(sizes).encode()


def own_net(opts, data):
    """Return what the function of --model builds, on the CPU; ready to be saved."""
    net = call_user(opts.model, opts, data).cpu()
    check_net(net, opts.model)
    return net


def check_net(net, name):
    """Refuse a net whose checkpoints would lack something."""
    for tensor in [*net.parameters(), *net.buffers()]:
        if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            tensor.data = tensor.data.clone()  # with holes, or expanded: fused optimizers write beside it
    again = net.state_dict()
    for path, value in net.state_dict().items():
        if not torch.is_tensor(value) or value.data_ptr() != again[path].data_ptr():
            raise UserError(
                f"model {name}: its state_dict makes {path} anew each time\n"
                "a checkpoint holds the net's own tensors: keep it in a buffer (register_buffer)"
            )


def own_optimizer(net, opts):
    """Return it at the rate of --lr; UserError if it is none, or has another rate that is not usual."""
    flag = f"--optimizer {opts.optimizer}"
    optimizer = call_user(opts.optimizer, net, opts, first=True)
    with blamed(flag, "return a torch.optim.Optimizer of the net's weights"):
        parts = [(part, part.param_groups) for part in parts_of(optimizer)]
    for part, groups in parts:
        usual = inspect.signature(type(part)).parameters.get("lr")
        is_open = usual and all(group.get("lr") == usual.default for group in groups)
        for group in groups:
            if not is_open and group.get("lr", opts.lr) != opts.lr:
                raise UserError(
                    f"{flag}: its lr={group['lr']} cannot take effect, --lr is {opts.lr}\n"
                    "give --lr, and a group with another rate a `scale`"
                )
            group["lr"] = opts.lr * group.get("scale", 1.0)
    return optimizer


def groups_without_decay(weights):
    """Return two groups: only weights of several dimensions decay (--no-decay-1d)."""
    return [
        {"params": [p for p in weights if p.dim() > 1]},
        {"params": [p for p in weights if p.dim() <= 1], "weight_decay": 0.0},
    ]
