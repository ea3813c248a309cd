"""A net of a user's own: from `--model path/to/file.py:function`, or given to Elastic."""

import torch
from torch import nn

from common.data import DataFacts
from common.errors import UserError
from common.extras.own_files import call_user
from common.options import Options


def own_net(opts: Options, data: DataFacts) -> nn.Module:
    """Return what the function of --model builds, on the CPU; ready to be saved."""
    net = call_user(opts.model, opts, data).cpu()
    check_net(net, opts.model)
    return net


def check_net(net: nn.Module, name: str) -> None:
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
