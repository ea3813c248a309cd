"""The scale of losses in fp16, over several devices and ranks (--amp fp16)."""

import torch


class Scaler(torch.amp.GradScaler):
    """A GradScaler: if a gradient overflows on one device, the step is skipped on all.

    Apart from the first steps it reads no number from a GPU, which would make the program wait for it.
    """

    def unscale(self, optimizer, device):
        """Undo the scale; call it on every rank, once a step."""
        self.scale(torch.zeros((), device=device))  # initialises it on ranks without a loss
        self.unscale_(optimizer)
        marks = self._found_inf_per_device(optimizer)
        overflows = sum((mark.to(device) for mark in marks.values()), torch.zeros((), device=device))
        for mark in marks.values():  # the optimizer adds them up, and accepts only 0 or 1
            mark.zero_()
        marks[device] = overflows.clamp_(max=1.0)

    def step(self, optimizer, *args, **kwargs):
        # a fused optimizer that skips its first step leaves momentum in memory that nobody has written
        if not optimizer.state and any(
            mark.item() for mark in self._found_inf_per_device(optimizer).values()
        ):
            return None
        return super().step(optimizer, *args, **kwargs)
