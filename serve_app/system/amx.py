"""Permission to use AMX, the matrix instructions of Intel's CPUs (Linux).

Linux ends a process that uses AMX without having asked (signal SIGILL). PyTorch asks before its first matrix
product of the size that gains from AMX, vLLM 0.32's attention never asks: an engine whose first prompt is
short, with a small bfloat16 model, dies of it. vLLM loads the entry points of the group
`vllm.general_plugins` in each of its processes; `allow_amx` is one of them.
"""


def allow_amx() -> None:
    """Ask Linux for AMX; without effect where the CPU has none."""
    # vLLM has imported torch already; whoever imports this module for its name alone needs no torch.
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
