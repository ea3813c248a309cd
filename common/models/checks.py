"""What a net must be to train, and for its checkpoints to hold all of it; found before the first step."""
import torch
from torch import nn

from common.errors import UserError


def named_tensors(net: nn.Module) -> list:
    return [*net.named_parameters(), *net.named_buffers()]


def check_net(net: nn.Module, name: str) -> None:
    """UserError for a net that could not be trained, or not be resumed."""
    for path, tensor in named_tensors(net):
        if nn.parameter.is_lazy(tensor):
            refuse(name, f"{path} has no size yet (a lazy layer)",
                   "give the layer all sizes, or run the net once on zeros before you return it")
        if tensor.is_meta:
            refuse(name, f"{path} has no values (device meta)", "return the net with its weights made")
        if tensor.layout != torch.strided:
            refuse(name, f"{path} is sparse ({tensor.layout})", "keep it dense (to_dense)")
        if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            tensor.data = tensor.data.clone()  # expanded: nothing can be loaded into it
    for path, module in net.named_modules():
        if getattr(module, "sparse", False) is True:
            refuse(name, f"{path} makes sparse gradients", "leave out sparse=True: updates here are dense")
    again = net.state_dict()
    for path, value in net.state_dict().items():
        if not torch.is_tensor(value) or value.data_ptr() != again[path].data_ptr():
            refuse(name, f"its state_dict makes {path} ({type(value).__name__}) anew in each call",
                   "a checkpoint holds the net's own tensors: keep it in a buffer (register_buffer)")


def check_trains(net, name):
    """UserError for a net in which no weight trains."""
    if not any(p.requires_grad for p in net.parameters()):
        refuse(name, "no weight of it trains", "give it weights with requires_grad, or --freeze fewer")


def refuse(name, fact, way):
    raise UserError(f"model {name}: {fact}\n{way}")
