"""What Triton launches depend on: powers of two that hold a width, and the limits of the GPU."""

import functools
import os
from typing import NamedTuple

import torch


class GpuLimits(NamedTuple):
    """What a launch plan must respect on a GPU."""

    multiprocessors: int
    shared_memory: int  # bytes that one program may have


# An H100 or H200: what plans assume where there is no GPU to ask, because kernels are interpreted, compiled
# for a test, or described by fake tensors.
HOPPER = GpuLimits(multiprocessors=132, shared_memory=227 * 1024)


def block(width: int, least: int = 16) -> int:
    """The power of two that holds a width; tensor cores take no less than 16."""
    return max(least, 1 << max(width - 1, 0).bit_length())


@functools.lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.lru_cache
def gpu_limits(device: torch.device) -> GpuLimits:
    """The limits of the device's GPU; HOPPER if the device is no GPU or cannot be queried."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER
    found = torch.cuda.get_device_properties(device)
    # what a program gets without asking for more (48 KB) is all there is where PyTorch names no other limit
    shared_memory = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return GpuLimits(found.multi_processor_count, shared_memory)


def searching(grid: tuple[int, int], few: bool) -> tuple[int, int]:
    """`grid` itself, or with `few` that of programs which look through it for the few parts they take.

    Four for each multiprocessor; two where kernels are interpreted, so that tests see them look on.
    """
    if not few:
        return grid
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return min(grid[0] * grid[1], 2 if interpreted else 4 * HOPPER.multiprocessors), 1
