"""Numbers that Triton launches are made of."""

import functools

import torch


def block(width: int, least: int = 16) -> int:
    """The power of two that holds a width; tensor cores take no less than 16."""
    return max(least, 1 << max(width - 1, 0).bit_length())


@functools.lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
