"""The delta rule on convolved inputs by Triton kernels of both ops."""
