"""Triton kernels of this op, and how they are launched."""
