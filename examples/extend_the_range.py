"""Train a small language model with eigenvalues in [0,1], open it in [-1,1], and go on training.

The text is the Python standard library, as bytes. The loss on held-out text is printed when the model is
opened, with all weights kept and with the function kept as nearly as weights allow, and after more steps;
beside them the same steps in [0,1].

Expected output, after about three minutes on one core (losses in nats per byte, the last digits vary):

    deltanet: 1.716 after 400 steps in [0,1]
      in [-1,1], weights kept: 1.799 at once, 1.667 after 100 more steps
      in [-1,1], function kept: 1.718 at once, 1.658 after 100 more steps
      still in [0,1]: 1.653
    mamba: 1.536 after 400 steps in [0,1]
      in [-1,1], weights kept: 1.545 at once, 1.506 after 100 more steps
      in [-1,1], function kept: 1.536 at once, 1.505 after 100 more steps
      still in [0,1]: 1.505
"""

import sys
import sysconfig
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from statetrack.layers import Model, build, extended_range

LENGTH, BATCH = 128, 16
STEPS, MORE = (int(n) for n in sys.argv[1:3]) if len(sys.argv) > 2 else (400, 100)


def text() -> torch.Tensor:
    """The bytes of the standard library's modules, in the order of their names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    joined = bytearray(b"".join(path.read_bytes() for path in files))
    return torch.frombuffer(joined, dtype=torch.uint8).long()


def train(model: Model, data: torch.Tensor, steps: int, seed: int) -> Model:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=generator)
        rows = torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])
        loss, _ = model(rows[:, :-1], targets=rows[:, 1:])
        optimizer.zero_grad()
        (loss / rows[:, 1:].numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


@torch.no_grad()
def heldout_loss(model: Model, data: torch.Tensor) -> float:
    rows = data[: 128 * (LENGTH + 1)].view(128, -1)
    logits, _ = model(rows[:, :-1])
    return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


for name in ("deltanet", "mamba"):
    torch.manual_seed(0)
    data = text()
    training, heldout = data[:-50_000], data[-50_000:]
    model = build(name, vocab_size=256, d_model=64, layers=2, eigenvalues="[0,1]")
    train(model, training, STEPS, seed=0)
    opened = {"weights": extended_range(model)}
    opened["function"] = extended_range(model, "function", training[: 32 * LENGTH].view(32, LENGTH))
    print(f"{name}: {heldout_loss(model, heldout):.3f} after {STEPS} steps in [0,1]")
    for kept, extended in opened.items():
        at_once = heldout_loss(extended, heldout)
        later = heldout_loss(train(extended, training, MORE, seed=1), heldout)
        print(f"  in [-1,1], {kept} kept: {at_once:.3f} at once, {later:.3f} after {MORE} more steps")
    print(f"  still in [0,1]: {heldout_loss(train(model, training, MORE, seed=1), heldout):.3f}")
