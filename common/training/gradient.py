"""A gradient made ready for the optimizer: overflows found, divided by what the task counts, clipped.

Nothing here reads a number from a GPU, which would make the program wait for it.
"""
from typing import Any

import torch


def finish_gradient(state: Any) -> None:
    """On every rank, as ranks that hold parts of one net tell each other overflows and lengths."""
    clip, scaler, divisor = state.opts.clip_grad_norm, state.scaler, state.divisor
    if scaler and (clip or state.all_sum or divisor is not None):
        unscale(state)
    gradients = [p.grad for p in state.names if p.grad is not None]
    logged = state.opts.tensorboard and (state.step + 1) % state.opts.log_every == 0
    shown = logged and not scaler and not state.all_sum
    norm = state.norm(gradients) if clip or shown else None
    if shown:
        state.grad_norm = norm if divisor is None else norm / divisor
    if divisor is not None:
        divide(state, gradients, divisor, norm)
    elif clip:
        torch.nn.utils.clip_grads_with_norm_(state.names, clip, norm)


def unscale(state):
    """Undoes fp16's scale; if one rank skips the step, all skip it."""
    none = torch.zeros((), device=next(iter(state.names)).device)
    state.scaler.scale(none)  # initialises the scaler on ranks without a loss
    state.scaler.unscale_(state.optimizer)
    if state.all_sum:
        found = state.scaler._found_inf_per_device(state.optimizer)
        own = sum((overflow.to(none.device) for overflow in found.values()), none)
        overflows = state.all_sum(own).clamp_(max=1.0)
        for other in found.values():  # the optimizer adds them up, and accepts only 0 or 1
            other.zero_()
        found[none.device] = overflows


def divide(state, gradients, divisor, norm):
    """Ends the mean over the global count: in one pass with the clipping, or inside a fused optimizer."""
    factor = 1 / divisor
    if clip := state.opts.clip_grad_norm:
        factor = factor * (clip / (norm.double() / divisor + 1e-6)).clamp(max=1.0)
    elif not state.scaler and all(group.get("fused") for group in state.optimizer.param_groups) and all(
            g.dtype == torch.float32 for g in gradients):
        state.optimizer.grad_scale = divisor.float()
        return
    gradients = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    for device, kind in {(g.device, g.dtype) for g in gradients}:
        alike = [g for g in gradients if (g.device, g.dtype) == (device, kind)]
        torch._foreach_mul_(alike, factor.to(device, torch.promote_types(kind, torch.float32)))
