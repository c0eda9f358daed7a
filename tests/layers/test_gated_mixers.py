"""Mixers with gates of either sign: against formulas of others, and what the range lets them learn."""

import pytest
import torch
import torch.nn.functional as F

from statetrack.layers import GLAConfig, HGRN2Config, Mamba2Config, build


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_logits_equal_those_of_transformers_on_the_same_weights(groups):
    from transformers import Mamba2Config as HFConfig
    from transformers import Mamba2ForCausalLM

    torch.manual_seed(0)
    config = HFConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=3,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=groups,
        chunk_size=32,
    )
    theirs = Mamba2ForCausalLM(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.05 * torch.randn_like(p))
    changes = {"d_model": 32, "layers": 3, "heads": 4, "d_state": 8, "groups": groups}
    ours = build("mamba2", vocab_size=50, eigenvalues="[0,1]", **changes)
    renamed = {}
    for name, p in theirs.state_dict().items():
        name = name.replace("backbone.embeddings", "embedding").replace("backbone.norm_f", "norm")
        name = name.replace("backbone.layers", "blocks").replace("lm_head", "head")
        name = name if ".mixer." in name else name.replace(".norm.", ".mixer_norm.")
        renamed[name] = p
    ours.load_state_dict(renamed)
    ids = torch.randint(50, (2, 75), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], theirs(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("eigenvalues", ["[0,1]", "[-1,1]"])
@torch.no_grad()
def test_gla_follows_the_equations_of_its_paper(eigenvalues):
    torch.manual_seed(0)
    mixer = GLAConfig(heads=1, eigenvalues=eigenvalues).build(8, 1).double()
    x = torch.randn(1, 20, 8).double()
    y, _ = mixer(x)
    s = torch.sigmoid(mixer.to_gate(x))
    a = s ** (1 / 16) if eigenvalues == "[0,1]" else 2 * s - 1
    S = torch.zeros(4, 8).double()
    for t in range(20):
        S = a[0, t, :, None] * S + torch.outer(mixer.to_k(x)[0, t], mixer.to_v(x)[0, t])
        o = S.T @ mixer.to_q(x)[0, t] / 2
        o = o / (o.square().mean() + 1e-5).sqrt()
        torch.testing.assert_close(y[0, t], mixer.to_out(o * F.silu(mixer.output_gate(x)[0, t])))


@pytest.mark.parametrize("eigenvalues", ["[0,1]", "[-1,1]"])
@torch.no_grad()
def test_hgrn2_writes_what_its_gate_forgets(eigenvalues):
    torch.manual_seed(0)
    mixer = HGRN2Config(heads=1, eigenvalues=eigenvalues).build(4, 1).double()
    x = torch.randn(1, 20, 4).double()
    y, _ = mixer(x)
    s = torch.sigmoid(mixer.to_f(x))[0]
    a = s if eigenvalues == "[0,1]" else 2 * s - 1
    S = torch.zeros(4, 4).double()
    for t in range(20):
        S = a[t, :, None] * S + torch.outer(1 - s[t], mixer.to_i(x)[0, t])
        o = S.T @ F.silu(mixer.to_q(x)[0, t]) / 2
        torch.testing.assert_close(y[0, t], mixer.to_out(o / (o.square().mean() + 1e-5).sqrt()))


def parity_batch(batch, length, generator):
    bits = torch.randint(2, (batch, length), generator=generator)
    return bits, bits.cumsum(1) % 2


def accuracy_on_longer_words(name, eigenvalues, steps=120, length=32, lr=1e-2):
    """The accuracy at the ends of words 4 times as long as those of a short training on parity."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = build(name, vocab_size=2, d_model=32, layers=1, eigenvalues=eigenvalues, heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        bits, parity = parity_batch(32, length, generator)
        loss = F.cross_entropy(model(bits)[0].flatten(0, 1), parity.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        bits, parity = parity_batch(64, 4 * length, generator)
        return (model(bits)[0].argmax(-1) == parity)[:, -length:].double().mean().item()


@pytest.mark.parametrize("name", ["gla", "hgrn2"])
def test_parity_is_learned_with_signed_gates_and_not_without(name):
    assert accuracy_on_longer_words(name, "[-1,1]") > 0.95
    assert accuracy_on_longer_words(name, "[0,1]") < 0.6


@pytest.mark.parametrize("name", ["mamba2", "mamba3", "mlstm"])
def test_parity_is_learned_by_one_gate_per_head_too(name):
    """Two gates in all; what the Mambas do in [0,1] is in the tests with weights set by hand."""
    assert accuracy_on_longer_words(name, "[-1,1]") > 0.95


@pytest.mark.parametrize("name", ["mamba2", "mamba3"])
def test_signed_gates_start_away_from_both_ends_and_move_in_opposite_directions(name):
    """The map to the steps, head by head: rows 0 and 1 are opposite, and a logit of 0 is a gate of 0.6."""
    torch.manual_seed(0)
    mixer = build(name, vocab_size=2, d_model=32, heads=5, expand=5, eigenvalues="[-1,1]").blocks[0].mixer
    gates = mixer.transition_eigenvalues(torch.zeros(1, 1, 32))
    torch.testing.assert_close(gates, torch.full_like(gates, 0.6))
    if name == "mamba2":
        rows = mixer.in_proj.weight[-5:]
        torch.testing.assert_close(rows[1:4:2], -rows[0:3:2])
        assert rows.abs().max() <= 4 / 32**0.5
        assert rows.abs().max() > 3 / 32**0.5


def parity_by_hand(eigenvalues):
    """A Mamba-2 on one-hot bits: step 30 on a one, 0 on a zero, and the same B, C and x at every step."""
    config = Mamba2Config(eigenvalues=eigenvalues, heads=1, d_state=1, expand=1, convolution=1)
    mixer = config.build(2, 1)
    rows = {"z": [[1, 1], [0, 0]], "x": [[1, 1], [0, 0]], "B": [[1, 1]], "C": [[1, 1]], "dt": [[-30, 30]]}
    weights = {
        "in_proj.weight": torch.tensor([row for part in rows.values() for row in part]).float(),
        "conv1d.weight": torch.ones(4, 1, 1),
        "conv1d.bias": torch.zeros(4),
        "dt_bias": torch.zeros(1),
        "A_log": torch.zeros(1),
        "D": torch.zeros(1),
        "norm.weight": torch.ones(2),
        "out_proj.weight": torch.eye(2),
    }
    mixer.load_state_dict(weights)
    return mixer


@torch.no_grad()
def test_a_signed_mamba2_computes_the_parity_of_thousands_of_bits_and_an_unsigned_one_forgets():
    bits, parity = parity_batch(2, 3000, torch.Generator().manual_seed(0))
    x = F.one_hot(bits, 2).float()
    signed, unsigned = (parity_by_hand(r)(x)[0][..., 0] > 0.5 for r in ("[-1,1]", "[0,1]"))
    assert torch.equal(signed.long(), parity)
    seen = bits.cumsum(1) > 0
    assert torch.equal(unsigned, seen)  # each one resets the state, and each zero keeps it


def test_the_spectrum_of_the_parity_weights_is_minus_one_and_one():
    x = F.one_hot(torch.tensor([[1, 0]]), 2).float()
    torch.testing.assert_close(
        parity_by_hand("[-1,1]").transition_eigenvalues(x), torch.tensor([-1.0, 1.0]).view(1, 2, 1, 1)
    )
