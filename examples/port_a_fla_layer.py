"""Port a DeltaNet layer written for flash-linear-attention: one import line, and eigenvalues in [-1,1].

The layer is written as users of that library write it: projections for q, k, v and beta, then a call of
`chunk_delta_rule`. `statetrack.delta_rule` takes the same tensors (time before heads) and the same
arguments. Beta in [0, 1] keeps the eigenvalues of the transition I - beta k k^T in [0, 1]; multiplied by 2
they cover [-1, 1], and the layer learns parity: trained at length 32, it is right at 128. About five
seconds on one core; flash-linear-attention is not needed.

Expected output: the larger range reaches 1.00, the smaller one stays near 0.50:

    eigenvalues in [0,1]   accuracy at length 128 0.5...
    eigenvalues in [-1,1]  accuracy at length 128 1.00
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# before: from fla.ops.delta_rule import chunk_delta_rule
from statetrack import delta_rule as chunk_delta_rule
from statetrack import task


class DeltaNetLayer(nn.Module):
    """x (B, T, width) -> y (B, T, width)."""

    def __init__(self, width: int, heads: int, beta_max: float):
        super().__init__()
        self.heads, self.beta_max = heads, beta_max
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.b_proj = nn.Linear(width, heads, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (F.silu(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in (q, k, v))  # (B, T, H, K)
        beta = self.beta_max * self.b_proj(x).sigmoid()  # before: self.b_proj(x).sigmoid()
        o, _ = chunk_delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=True)
        return self.o_proj(o.flatten(-2))


def accuracy_on_parity(beta_max: float, steps: int = 150, length: int = 32) -> float:
    """Train embedding, layer and head; the share of right answers after 4 x `length` bits."""
    torch.manual_seed(0)
    parity, generator = task("parity-dense"), torch.Generator().manual_seed(1)
    layer, head = DeltaNetLayer(32, 2, beta_max), nn.Linear(32, parity.n_classes)
    model = nn.Sequential(nn.Embedding(parity.vocab_size, 32), layer, nn.RMSNorm(32), head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        batch = parity.sample(64, (length, length), generator)
        optimizer.zero_grad()
        F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten()).backward()
        optimizer.step()
    batch = parity.sample(512, (4 * length, 4 * length), generator)
    right = model(batch.inputs).argmax(-1) == batch.targets
    return right[:, -1].float().mean().item()


if __name__ == "__main__":
    for name, beta_max in (("[0,1]", 1.0), ("[-1,1]", 2.0)):
        accuracy = accuracy_on_parity(beta_max)
        print(f"eigenvalues in {name:<6}  accuracy at length 128 {accuracy:.2f}")
