"""What every backend of the selective scan takes: the tensors and the options of a call."""

from typing import NamedTuple

from torch import Tensor


class ScanInputs(NamedTuple):
    """The tensors of a call, with the shapes of `selective_scan_reference`."""

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    z: Tensor | None = None
    delta_bias: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None


class ScanOptions(NamedTuple):
    """What changes the computation, apart from tensors.

    A named tuple: immutable and hashable like a frozen dataclass, at a third of the cost per call.
    """

    delta_softplus: bool = False
    eigenvalues: str = "[-1,1]"
    max_seqlen: int | None = None

    def signed(self) -> bool:
        """Whether eigenvalues may be negative, a = 2 exp(delta A) - 1: what kernels and schemas take."""
        return self.eigenvalues == "[-1,1]"
