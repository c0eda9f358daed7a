"""The embedding by `torch.nn.functional.embedding`: the definition."""

import torch.nn.functional as F
from torch import Tensor


def embedding_reference(tokens: Tensor, weight: Tensor) -> Tensor:
    """weight[tokens]. Shapes: tokens (...), whole numbers below V; weight (V, D); result (..., D)."""
    return F.embedding(tokens, weight)
