"""What a person asks of a running training (RUN/control/, SIGUSR2): every rank does it at the same step."""
from typing import Any

import torch

from common.ledger import CONTROLS, Ledger
from common.world import World


class Wishes:
    """`asked` is why this rank shall stop: the name of a signal, or of a file in RUN/control/."""

    def __init__(self, state: Any, world: World, ledger: Ledger) -> None:
        self.state, self.world, self.ledger = state, world, ledger
        self.control = ledger.status.control
        self.asked: str | None = None

    def all_sum(self, totals: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; the same collective tells every rank what is wished on any of them."""
        flags = torch.tensor([name in self.control.wanted for name in CONTROLS])
        both = self.world.all_sum(torch.cat([totals.flatten(), flags.to(totals)]))
        totals.copy_(both[:-len(CONTROLS)].view_as(totals))
        names = [name for name, count in zip(CONTROLS, both[-len(CONTROLS):].tolist(), strict=True) if count]
        self.control.agree(names, self.state.step + 1)
        for name in names if self.world.rank == 0 else ():
            self.ledger.event("control", what=name, step=self.state.step + 1)
        self.told("stop")
        return totals

    def told(self, name: str) -> bool:
        """Whether all ranks have agreed to do this now; True once, and the same on every rank."""
        told = self.control.take(name)
        if told and name.startswith("stop"):
            self.asked = self.asked or f"control/{name}"
        return told
