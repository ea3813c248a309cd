"""State that is no weight, no buffer and no position: of optimizers, and of a loop's own things.

From a thing with `state_dict` to named tensors: `flat` leaves tensors as they are, and makes one text of all
else; `unflat` gives the same back. Nothing is pickled. A loop may change its things at any line, and a save
comes at any time: `commit` copies what a checkpoint shall hold. The text is made at a save.
"""

import copy
import json

import numpy
import torch
from torch import Tensor, nn

from common.data import map_tensors
from common.errors import UserError, warn
from common.training import parts_of
from common.world import fingerprint_of

TORCHS = frozenset(vars(torch.optim.SGD([torch.zeros(1)])))  # what each optimizer has for itself
OWN = "settings"  # of the optimizer: the name of what it keeps beside tensors of weights

WORDS = (bool, int, float, str, type(None))  # what a text can hold


class Memory:
    """Things by their names, and what they held when all was well; the optimizer's settings are one of them.

    What the settings are at the start follows from the options: only others are saved.
    """

    def __init__(self, optimizer, names, scheduled, things):
        wrong = [name for name in things if name == OWN or "/" in name]
        if wrong:
            raise UserError(f"memory {wrong[0]!r}: this name is taken, or has a /\nchoose another one")
        self.things = {OWN: Settings(optimizer, names, scheduled), **things}
        self.held = {}
        self.commit()
        self.first = self._named(OWN)
        self.tensors()  # refuses what cannot be saved

    def commit(self, *names):
        """Copy what these things hold now, else all: it belongs to the last step."""
        for name in names or self.things:
            self.held[name] = map_tensors(lambda t: t.detach().clone(), self.things[name].state_dict())

    def tensors(self):
        """Return what was committed, as named tensors."""
        named = {}
        for name in self.things:
            tensors = self._named(name)
            if name != OWN or not same(tensors, self.first):
                named |= tensors
        return named

    def _named(self, name):
        return {f"/{name}/{key}": tensor for key, tensor in flat(self.held[name], name).items()}

    def refuse_changes(self, when):
        """Raise a UserError if a thing holds another value than was committed."""
        for name, thing in self.things.items():
            if not same(flat(self.held[name], name), flat(thing.state_dict(), name)):
                raise UserError(f"memory {name} is changed {when}\nchange it where run.stepped is true")

    def load(self, tensors):
        """Give the things what `tensors` of an earlier life has returned."""
        for name, thing in self.things.items():
            start = f"/{name}/"
            own = {key.removeprefix(start): t for key, t in tensors.items() if key.startswith(start)}
            if own:
                thing.load_state_dict(unflat(own, thing.state_dict()))
            elif name != OWN:
                warn(f"memory {name} is in no checkpoint yet: it begins anew")
        self.commit()


class Settings:
    """What an optimizer keeps beside weights and tensors of them; a loop may change it.

    In its groups, among the state of a weight, and on itself: numbers, words, None, lists of them and of
    tensors. A function is no state.
    """

    def __init__(self, optimizer, names, scheduled):
        self.optimizer = optimizer
        self.names = names
        self.derived = {"params", "lr"} if scheduled else {"params"}  # they follow from the step

    def state_dict(self):
        groups = []
        numbers = {}
        own = {}
        for i, part in enumerate(parts_of(self.optimizer)):
            groups += [plain_of(group, self.derived) for group in part.param_groups]
            own |= {f"{i}/{key}": value for key, value in plain_of(vars(part), TORCHS).items()}
            for p, values in part.state.items():
                if not isinstance(p, Tensor):
                    numbers[f"{i}//{p}"] = values
                    continue
                for key, value in values.items():
                    if not torch.is_tensor(value):
                        numbers[f"{i}/{self.names[p]}/{key}"] = value
        # sorted: a resumed optimizer has them in another order
        return {"groups": groups, "numbers": dict(sorted(numbers.items())), "own": dict(sorted(own.items()))}

    def load_state_dict(self, state):
        parts = parts_of(self.optimizer)
        groups = [group for part in parts for group in part.param_groups]
        for group, values in zip(groups, state["groups"], strict=True):
            group.update(values)
        weights = {name: p for p, name in self.names.items()}
        for name, value in state["numbers"].items():
            number, rest = name.split("/", 1)
            weight, _, key = rest.rpartition("/")
            kept = parts[int(number)].state
            if weight:
                device = weights[weight].device
                # a counter, without dimensions, may lie on the CPU
                kept[weights[weight]][key] = map_tensors(
                    lambda t, device=device: t.to(device) if t.dim() else t, value
                )
            else:
                kept[key] = value
        for name, value in state["own"].items():
            number, key = name.split("/", 1)
            setattr(parts[int(number)], key, value)


def plain_of(values, without):
    """Return what is state among these values."""
    return {key: value for key, value in values.items() if key not in without and is_plain(value)}


def same(a, b):
    """Return whether these are the same tensors to the last bit, by the same names."""
    return a.keys() == b.keys() and fingerprint_of(a.values()) == fingerprint_of(b[name] for name in a)


def is_plain(value):
    """Return whether this is state: no weight, function or object."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, [*value, *value.values()]))
    return isinstance(value, (*WORDS, Tensor)) and not isinstance(value, nn.Parameter)


def flat(value, name):
    """Return a nest of dicts, lists and tuples as tensors by name: those in it, and a text of the rest."""
    tensors = {}

    def plain(value, path):
        if isinstance(value, Tensor):
            while path in tensors:  # of the keys 1 and "1", or a.b beside a dict a with b
                path += "'"
            tensors[path] = value
            return {"tensor": path}
        if isinstance(value, dict):
            return {"dict": [[plain(key, path), plain(v, f"{path}.{key}")] for key, v in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [plain(v, f"{path}.{i}") for i, v in enumerate(value)]}
        if isinstance(value, numpy.generic):
            value = value.item()
        if isinstance(value, WORDS):
            return value
        raise UserError(
            f"{name}: {path} is a {type(value).__name__}, which no checkpoint would hold\n"
            "keep tensors, numbers and words, in lists and dicts"
        )

    text = json.dumps(plain(value, "tensor"))
    tensors["text"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return tensors


def unflat(tensors, like):
    """Return what `flat` was given; its own kind of dict, and its device, where `like` has one."""

    def nested(value, like):
        match value:
            case {"tensor": path}:
                return tensors[path].to(like.device) if isinstance(like, Tensor) else tensors[path]
            case {"dict": pairs}:
                known = like if isinstance(like, dict) else {}
                made = copy.copy(known) if type(known).__module__ == "collections" else {}
                made.clear()  # a copy, as a defaultdict keeps its factory
                for key, inner in pairs:
                    name = nested(key, None)
                    made[name] = nested(inner, known.get(name))
                return made
            case {"list": values} | {"tuple": values}:
                fits = isinstance(like, (list, tuple)) and len(like) == len(values)
                likes = like if fits else [None] * len(values)
                found = [nested(v, other) for v, other in zip(values, likes, strict=True)]
                return tuple(found) if "tuple" in value else found
        return value

    return nested(json.loads(tensors["text"].numpy().tobytes()), like)
