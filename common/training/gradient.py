"""A gradient made ready for the optimizer: overflows found, divided by what the task counts, clipped."""
from typing import Any

import torch


def finish_gradient(state: Any) -> None:
    """On every rank, as ranks that hold parts of one net tell each other overflows and lengths."""
    clip, scaler = state.opts.clip_grad_norm, state.scaler
    if scaler and (clip or state.all_sum or state.divisor is not None):
        unscale(state)
    shown = state.opts.tensorboard and (state.step + 1) % state.opts.log_every == 0
    if shown and not scaler and not state.all_sum:
        norm = state.norm([p.grad for p in state.names if p.grad is not None])  # for the log
        state.grad_norm = float(norm) / (1.0 if state.divisor is None else float(state.divisor))
    if state.divisor is not None:
        divide(state, float(state.divisor))
    elif clip:
        norm = state.norm([p.grad for p in state.names if p.grad is not None])
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


def divide(state, divisor):
    """Ends the mean over the global count: in one pass with the clipping, or inside a fused optimizer."""
    gradients, factor = [p.grad for p in state.names if p.grad is not None], 1 / divisor
    if state.opts.clip_grad_norm:
        factor *= min(1.0, state.opts.clip_grad_norm / (float(state.norm(gradients)) / divisor + 1e-6))
    elif not state.scaler and all(group.get("fused") for group in state.optimizer.param_groups) and all(
            g.dtype == torch.float32 for g in gradients):
        state.optimizer.grad_scale = torch.tensor(divisor, device=next(iter(state.names)).device)
        return
    torch._foreach_mul_([g.to_local() if hasattr(g, "to_local") else g for g in gradients], factor)
