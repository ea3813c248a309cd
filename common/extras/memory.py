"""State that is no weight, no buffer and no position: of optimizers, and of a loop's own things.

From a thing with `state_dict` to named tensors: `flat` leaves tensors as they are, and makes one text of all
else; `unflat` gives the same back. Nothing is pickled. `commit` copies what a checkpoint shall hold; a loop
may change its things at any line, and a save comes at any time. The text is made at a save.
"""

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.errors import UserError, warn
from common.training import Thing, parts_of

TORCHS = frozenset(vars(torch.optim.SGD([torch.zeros(1)])))  # what each optimizer has for itself
FIRST_LOOKS = 4  # so many commits at the start of a life look at each number
OWN = "settings"  # of the optimizer: the name of what it keeps beside tensors of weights


class Memory:
    """Things by their names, and what they held when all was well; the optimizer's settings are one of them.

    What the settings are at the start follows from the options: only others are saved.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: dict, scheduled: bool, things: dict[str, Thing]
    ) -> None:
        wrong = [name for name in things if name == OWN or "/" in name]
        if wrong:
            raise UserError(f"memory {wrong[0]!r}: this name is taken, or has a /\nchoose another one")
        self.things = {OWN: Settings(optimizer, names, scheduled), **things}
        self.held: dict[str, Any] = {}
        self.uncounted: set[str] = set()  # things that change tensors behind torch's back, by `.data`
        self.looks = FIRST_LOOKS
        self.commit(exactly=True)
        self.first = self._named(OWN)
        self.tensors()  # refuses what cannot be saved

    def commit(self, *names: str, exactly: bool = False) -> None:
        """What these things hold now, else all, belongs to the last step; copies what has changed.

        torch counts the changes of a tensor, but not those by `.data`: `exactly` looks at each number.
        """
        self.looks -= not names
        for name in names or self.things:
            exact = exactly or self.looks >= 0 or name in self.uncounted
            held = copied(self.things[name].state_dict(), self.held.get(name), exact)
            if exact and name in self.held and changed_uncounted(self.held[name], held):
                self.uncounted.add(name)
            self.held[name] = held

    def commit_settings(self) -> None:
        """Within a step: the optimizer has changed them, the loop has not come back."""
        self.commit(OWN)

    def tensors(self) -> dict[str, Tensor]:
        """What was committed, as named tensors."""
        own = self._named(OWN)
        first = getattr(self, "first", {})
        named = {} if same(own, first) else own
        for name in self.things:
            if name != OWN:
                named |= self._named(name)
        return named

    def _named(self, name):
        return {f"/{name}/{key}": tensor for key, tensor in flat(self.held[name], name).items()}

    def refuse_changes(self, when: str) -> None:
        """UserError if a thing holds another value than was committed."""
        for name, thing in self.things.items():
            if not same(flat(self.held[name], name), flat(thing.state_dict(), name)):
                raise UserError(f"memory {name} is changed {when}\nchange it where run.stepped is true")

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Gives the things what `tensors` of an earlier life has returned."""
        for name, thing in self.things.items():
            start = f"/{name}/"
            own = {key.removeprefix(start): t for key, t in tensors.items() if key.startswith(start)}
            if own:
                thing.load_state_dict(unflat(own, thing.state_dict()))
            elif name != OWN:
                warn(f"memory {name} is in no checkpoint yet: it begins anew")
        self.commit(exactly=True)


class Settings:
    """What an optimizer keeps beside weights and tensors of them; a loop may change it.

    In its groups, among the state of a weight, and on itself: numbers, words, None, lists of them and of
    tensors. A function is no state.
    """

    def __init__(self, optimizer, names, scheduled):
        self.optimizer = optimizer
        self.names = names
        self.derived = {"params", "lr"} if scheduled else {"params"}  # they follow from the step

    def state_dict(self) -> dict[str, Any]:
        groups = []
        numbers = {}
        own = {}
        for i, part in enumerate(parts_of(self.optimizer)):
            for group in part.param_groups:
                groups.append(
                    {
                        key: value
                        for key, value in group.items()
                        if key not in self.derived and is_plain(value)
                    }
                )
            for p, values in part.state.items():
                if not isinstance(p, Tensor):
                    numbers[f"{i}//{p}"] = values
                    continue
                for key, value in values.items():
                    if not torch.is_tensor(value):
                        numbers[f"{i}/{self.names[p]}/{key}"] = value
            for key, value in vars(part).items():
                if key not in TORCHS and is_plain(value):
                    own[f"{i}/{key}"] = value
        # sorted: a resumed optimizer has them in another order
        return {"groups": groups, "numbers": dict(sorted(numbers.items())), "own": dict(sorted(own.items()))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
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
                p = weights[weight]
                kept[p][key] = on_device_of(value, p)
            else:
                kept[key] = value
        for name, value in state["own"].items():
            number, key = name.split("/", 1)
            setattr(parts[int(number)], key, value)


class Copy(NamedTuple):
    """A tensor as it was, and how often torch had changed the one it is of."""

    tensor: Tensor
    mark: tuple[int, int]


def copied(value: Any, before: Any = None, exactly: bool = True) -> Any:
    """A nest with its own tensors: those of the nest `before` where they have not changed."""
    if torch.is_tensor(value):
        mark = (value.data_ptr(), value._version)
        if isinstance(before, Copy) and before.mark == mark and not exactly:
            return before
        if isinstance(before, Copy) and before.mark == mark and is_equal(before.tensor, value):
            return before
        return Copy(value.detach().clone(), mark)
    if isinstance(value, dict):
        known = before if isinstance(before, dict) else {}
        return {key: copied(v, known.get(key), exactly) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return listed(
            value, [copied(v, b, exactly) for v, b in zip(value, beside(before, value), strict=True)]
        )
    return value


def changed_uncounted(before, now):
    """Whether a tensor of two copies of one nest has other numbers, and torch has counted no change."""
    if isinstance(before, Copy) and isinstance(now, Copy):
        return before.mark == now.mark and before is not now
    if isinstance(before, dict) and isinstance(now, dict):
        return any(changed_uncounted(before.get(key), value) for key, value in now.items())
    if isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)):
        return any(map(changed_uncounted, before, now))
    return False


def is_equal(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(is_equal(a[key], b[key]) for key in a)


def is_plain(value):
    """Whether this is state: no weight, function or object."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, [*value, *value.values()]))
    return (
        value is None
        or isinstance(value, (bool, int, float, str, Tensor))
        and not isinstance(value, nn.Parameter)
    )


def on_device_of(value, p):
    """Tensors of a weight's state lie where it does; a counter, without dimensions, may lie on the CPU."""
    if torch.is_tensor(value):
        return value.to(p.device) if value.dim() else value
    if isinstance(value, (list, tuple)):
        return listed(value, [on_device_of(v, p) for v in value])
    return value


def flat(value: Any, name: str) -> dict[str, Tensor]:
    """A nest of dicts, lists and tuples as tensors by name: those in it, and one text of the rest."""
    tensors = {}

    def plain(value, path):
        if isinstance(value, Tensor):
            tensors[path] = value
            return {"tensor": path}
        if isinstance(value, Copy):
            return plain(value.tensor, path)
        if isinstance(value, dict):
            return {"dict": [[key, plain(v, f"{path}.{key}")] for key, v in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [plain(v, f"{path}.{i}") for i, v in enumerate(value)]}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise UserError(
            f"{name}: {path} is a {type(value).__name__}, which no checkpoint would hold\n"
            "keep tensors, numbers and words, in lists and dicts"
        )

    text = json.dumps(plain(value, "tensor"))
    tensors["text"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return tensors


def unflat(tensors: dict[str, Tensor], like: Any) -> Any:
    """What `flat` was given; its own kind of dict, and its device, where `like` has one."""

    def nested(value, like):
        match value:
            case {"tensor": path}:
                return tensors[path].to(like.device) if isinstance(like, Tensor) else tensors[path]
            case {"dict": pairs}:
                known = like if isinstance(like, dict) else {}
                kind = type(like) if type(like).__module__ == "collections" else dict
                return kind({key: nested(v, known.get(key)) for key, v in pairs})
            case {"list": values}:
                return [nested(v, likes) for v, likes in zip(values, beside(like, values), strict=True)]
            case {"tuple": values}:
                return tuple(nested(v, likes) for v, likes in zip(values, beside(like, values), strict=True))
        return value

    return nested(json.loads(tensors["text"].numpy().tobytes()), like)


def listed(like, values):
    return tuple(values) if isinstance(like, tuple) else values


def beside(like, values):
    """The values of another list of this length, or None for each."""
    fits = isinstance(like, (list, tuple)) and len(like) == len(values)
    return like if fits else [None] * len(values)
