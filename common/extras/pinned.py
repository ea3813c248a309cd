"""Host memory into which a GPU copies by itself, while the program continues."""

from contextlib import suppress

import torch


def pinned(buffer, device):
    """Lock the pages of a buffer, so that this GPU copies into it; return False if it cannot.

    Memory that torch allocates for that is as large as the next power of two.
    """
    with torch.cuda.device(device):
        refused = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), len(buffer), 0))
    if refused:
        with suppress(RuntimeError):  # CUDA keeps the error for the next call: let it be this one
            torch.zeros(1, device=device)
    return not refused
