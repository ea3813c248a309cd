"""What a person asks of a running training (RUN/control/, SIGUSR2): every rank does it at the same step."""
import contextlib
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
        self.stop_at, self.lost = 0, False  # the step after which all ranks stop; whether a rank has ended

    def stop(self, why: str) -> None:
        """After a signal: the first rank that has one names the last step, so that all ranks make it."""
        at = self.state.step + 2 + self.state.updates.ahead
        with contextlib.suppress(RuntimeError):  # rank 0 has gone with its store
            if self.world.size > 1 and not self.lost:
                self.stop_at = int(self.world.new_store_client().compare_set("stop at", "", str(at)))
        self.asked = why

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
        if (told := self.control.take(name)) and name.startswith("stop"):
            self.asked = self.asked or f"control/{name}"
        return told
