"""A net cut into stages over the devices of this process; the net itself, and the names in its checkpoint, stay whole."""
from torch import nn

from common import UserError


class Stages(nn.Module):
    """Runs the children of a Sequential one after the other, each on its device; the input goes where the first one is."""

    def __init__(self, net, places):
        super().__init__()
        self.net, self.places = net, places

    def forward(self, x):
        for part, device in zip(self.net, self.places, strict=True):
            x = part(x.to(device))
        return x.to(self.places[0])


def split(net, devices):
    """The net's children moved to `devices`, in contiguous runs of about equal weight, or where `net.placement` says."""
    if len(devices) < 2:
        raise UserError(f"train_mp.py splits a net over two devices or more, here is one: {devices[0]}\n"
                        "for example --devices cuda:0,cuda:1, or --devices cpu,cpu to see it work; on one device use train_ddp.py")
    if not isinstance(net, nn.Sequential) or len(net) < len(devices):
        what = f"an nn.Sequential of {len(net)}" if isinstance(net, nn.Sequential) else type(net).__name__
        raise UserError(f"{len(devices)} devices, but this model is {what}\n"
                        "a net is cut between the children of an nn.Sequential: choose another --model, or fewer --devices")
    placement = getattr(net, "placement", None)
    if len(devices) != 2 or placement is None:
        placement = balance([sum(p.numel() for p in part.parameters()) + 1 for part in net], len(devices))
    places = [devices[i] for i in placement]
    for part, device in zip(net, places, strict=True):
        part.to(device)
    return Stages(net, places)


def balance(weights, count):
    """A stage for each child: contiguous, none empty, the heaviest as light as it can be (exact, by dynamic programming)."""
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    best = {(0, 0): (0, None)}                                      # (children placed, stages used): (heaviest, cut before)
    for stages in range(1, count + 1):
        for end in range(stages, len(weights) + 1):
            best[end, stages] = min((max(best[start, stages - 1][0], sums[end] - sums[start]), start)
                                    for start in range(stages - 1, end) if (start, stages - 1) in best)
    placement, end = [], len(weights)
    for stage in range(count - 1, -1, -1):
        start = best[end, stage + 1][1]
        placement = [stage] * (end - start) + placement
        end = start
    return placement


def describe(stages):
    """One line: which child is where."""
    names = [name for name, _ in stages.net.named_children()]
    return "stages: " + "  ".join(f"{name} on {device}" for name, device in zip(names, stages.places, strict=True))
