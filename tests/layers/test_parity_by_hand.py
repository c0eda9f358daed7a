"""Every mixer with negative eigenvalues has weights for parity: set by hand, run through the layer itself.

Bits come in one-hot form, so a row (a, b) of a linear map is a on a zero and b on a one. On a one the state
is multiplied by -1; on a zero it is kept. Either a one also writes, and the state is 0, w, 0, w, ... along
the ones; or nothing is written, the state begins at 1, and its sign is the parity.
"""

import pytest
import torch
import torch.nn.functional as F

from statetrack.layers import (
    PRESETS,
    DeltaNetConfig,
    GLAConfig,
    HGRN2Config,
    KDAConfig,
    Mamba2Config,
    Mamba3Config,
    MambaConfig,
    MLSTMConfig,
)
from statetrack.layers.deltanet import DeltaNetState
from statetrack.layers.kda import KDAState
from statetrack.layers.mamba3 import Mamba3State

ALWAYS, NEVER, ONES, ZEROS = (1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (1.0, 0.0)
FLIP = (40.0, -40.0)  # the logit of a gate: 1 on a zero, and -1 (or 0, in [0,1]) on a one
STEP = (-30.0, 30.0)  # a step size before the softplus: 0 on a zero, 30 on a one


def hand_set(config, weights, layers=1):
    """The mixer on two channels with all parameters 0 but these; norms keep their weights of 1."""
    mixer = config.build(2, layers)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        for name, value in weights.items():
            parameter = mixer.get_parameter(name)
            parameter.copy_(torch.tensor(value, dtype=torch.float32).expand_as(parameter))
    return mixer


def gla(eigenvalues):
    weights = {
        "to_q.weight": ALWAYS,
        "to_k.weight": ONES,
        "to_v.weight": ALWAYS,
        "output_gate.weight": ALWAYS,
    }
    weights |= {"to_gate.0.weight": ONES, "to_gate.1.weight": -80.0, "to_gate.1.bias": 40.0}
    config = GLAConfig(heads=1, head_dim=1, gate_rank=1, eigenvalues=eigenvalues)
    return hand_set(config, weights | {"to_out.weight": ALWAYS}), None


def hgrn2(eigenvalues):
    weights = {"to_q.weight": ALWAYS, "to_f.weight": FLIP, "to_i.weight": ALWAYS, "to_out.weight": ALWAYS}
    return hand_set(HGRN2Config(heads=1, eigenvalues=eigenvalues), weights), None


def mamba(eigenvalues):
    """Channel 0 is always 1 after the SiLU, channel 1 only on ones, where the step is large."""
    one = 1.2784645  # silu(one) = 1
    rows = [[one, one], [0, one], [one, one], [one, one]]  # u, u, z, z
    weights = {"in_proj.weight": rows, "conv1d.weight": 1.0, "x_proj.weight": [[0, 1], [1, 0], [1, 0]]}
    weights |= {"dt_proj.weight": 60.0, "dt_proj.bias": -30.0, "out_proj.weight": ZEROS}
    config = MambaConfig(eigenvalues=eigenvalues, d_state=1, expand=1, convolution=1, dt_rank=1)
    return hand_set(config, weights), None


def mamba2(eigenvalues):
    rows = [ALWAYS, ALWAYS, ALWAYS, ALWAYS, ALWAYS, ALWAYS, STEP]  # z, z, x, x, B, C, step
    config = Mamba2Config(eigenvalues=eigenvalues, heads=1, d_state=1, expand=1, convolution=1)
    weights = {"in_proj.weight": rows, "conv1d.weight": 1.0, "out_proj.weight": ALWAYS}
    return hand_set(config, weights), None


def mamba3(eigenvalues):
    """Written are both halves of the trapezoid's weight with the last token: sigmoid(40) = 1."""
    trapezoid = (40.0, 40.0)
    if eigenvalues != "unit-circle":
        rows = [ALWAYS, ALWAYS, ALWAYS, ALWAYS, ALWAYS, ALWAYS, STEP, NEVER, trapezoid]
        config = Mamba3Config(eigenvalues=eigenvalues, heads=1, d_state=1, expand=1)
        return hand_set(config, {"in_proj.weight": rows, "out_proj.weight": ALWAYS}), None
    # a turn by pi on a one, where the step is 1; A is as near to 0 as it can be, -1e-4
    slow, angle = (-1e5, -1e5), (0.0, 20.0)
    rows = [
        ALWAYS,
        ALWAYS,
        NEVER,
        NEVER,
        ALWAYS,
        ALWAYS,
        ALWAYS,
        ALWAYS,
        (-40, 0.5413249),
        slow,
        trapezoid,
        angle,
    ]
    config = Mamba3Config(heads=1, d_state=2, expand=1, rotated=1)
    mixer = hand_set(config, {"in_proj.weight": rows, "out_proj.weight": ALWAYS})
    return mixer, Mamba3State(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))


def mlstm(eigenvalues, normaliser=True):
    """Channel 0 is always 1 and makes keys and queries; channel 1 is the bit, in v, and makes the gates."""
    config = MLSTMConfig(heads=1, convolution=1, eigenvalues=eigenvalues, normaliser=normaliser)
    mixer = hand_set(config, {"convolution.weight": 1.0})
    width = mixer.skip.numel()
    with torch.no_grad():
        mixer.to_up.weight[0] = 1
        mixer.to_up.weight[1, 1] = 1
        mixer.to_up.weight[width:] = 1
        for linear in (mixer.to_q, mixer.to_k):
            linear.weight[0, 0, 0] = 1 if linear is mixer.to_q else 8
        mixer.to_v.weight[0] = torch.eye(4)
        mixer.to_i.weight[0, 2 * width + 1], mixer.to_i.bias[0] = 40, -40
        mixer.to_f.weight[0, 2 * width + 1], mixer.to_f.bias[0] = -80, 40
        mixer.to_out.weight[:, 0] = 1
    return mixer, None


def deltanet(eigenvalues):
    """beta is 0 on a zero and 2 (or 1, in [0,1]) on a one."""
    weights = {"to_q.weight": ALWAYS, "to_k.weight": ALWAYS, "to_out.weight": 1.0}
    config = DeltaNetConfig(heads=1, head_dim=1, convolution=0, eigenvalues=eigenvalues)
    mixer = hand_set(config, weights | {"to_beta.weight": (-40.0, 40.0)})
    return mixer, DeltaNetState(torch.ones(1, 1, 1, 1), None)


def rotating_deltanet(eigenvalues):
    """beta is 0, and a one turns both channels by pi tanh(20) = pi."""
    weights = {"to_q.weight": ALWAYS, "to_k.weight": ALWAYS, "to_beta.weight": (-40.0, -40.0)}
    weights |= {"to_angle.weight": (0.0, 20.0), "to_out.weight": 1.0}
    config = DeltaNetConfig(heads=1, head_dim=2, value_dim=1, convolution=0, eigenvalues=eigenvalues)
    return hand_set(config, weights), DeltaNetState(torch.ones(1, 1, 2, 1), None)


def gated_deltanet(eigenvalues):
    """beta is 0, and the gate 2 exp(g) - 1 is 1 or -1."""
    weights = {"to_q.weight": ALWAYS, "to_k.weight": ALWAYS, "to_beta.weight": (-40.0, -40.0)}
    weights |= {"to_decay.weight": (-40.0, 40.0), "output_gate.weight": ALWAYS, "to_out.weight": 1.0}
    options = {"gated": True, "signed_gate": True, "output_gate": True}
    config = DeltaNetConfig(heads=1, head_dim=1, convolution=0, eigenvalues=eigenvalues, **options)
    return hand_set(config, weights), DeltaNetState(torch.ones(1, 1, 1, 1), None)


def kda(eigenvalues):
    weights = {"to_q.weight": ALWAYS, "to_k.weight": ALWAYS, "to_out.weight": 1.0, "decay_bias": -40.0}
    config = KDAConfig(heads=1, head_dim=1, convolution=0, eigenvalues=eigenvalues)
    mixer = hand_set(config, weights | {"to_beta.weight": (-40.0, 40.0)})
    return mixer, KDAState(torch.ones(1, 1, 1, 1), None)


def signed_kda(eigenvalues):
    weights = {"to_q.weight": ALWAYS, "to_k.weight": ALWAYS, "to_beta.weight": (-40.0, -40.0)}
    weights |= {"to_decay.0.weight": (-40.0, 40.0), "to_decay.1.weight": 1.0, "to_out.weight": 1.0}
    config = KDAConfig(heads=1, head_dim=1, convolution=0, signed_gate=True, eigenvalues=eigenvalues)
    return hand_set(config, weights), KDAState(torch.ones(1, 1, 1, 1), None)


SIGNED = "[-1,1]"
BY_HAND = {
    "gla": (gla, SIGNED),
    "hgrn2": (hgrn2, SIGNED),
    "mamba": (mamba, SIGNED),
    "mamba2": (mamba2, SIGNED),
    "mamba3": (mamba3, SIGNED),
    "mamba3, unit circle": (mamba3, "unit-circle"),
    "mlstm": (mlstm, SIGNED),
    "mlstm, no normaliser": (lambda eigenvalues: mlstm(eigenvalues, False), SIGNED),
    "deltanet": (deltanet, SIGNED),
    "deltanet-rotating": (rotating_deltanet, "unit-circle"),
    "gated-deltanet-signed": (gated_deltanet, SIGNED),
    "kda": (kda, SIGNED),
    "kda, signed gate": (signed_kda, SIGNED),
}


def odd_by(mixer, state, bits):
    y = mixer(F.one_hot(bits, 2).float(), state)[0][..., 0]
    return y < 0 if state is not None else y.abs() > 0.05


@torch.no_grad()
@pytest.mark.parametrize("name", BY_HAND)
def test_parity_of_two_thousand_bits(name):
    build, eigenvalues = BY_HAND[name]
    bits = torch.randint(2, (1, 2000), generator=torch.Generator().manual_seed(0))
    assert torch.equal(odd_by(*build(eigenvalues), bits), bits.cumsum(1) % 2 == 1)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [name for name, (_, eigenvalues) in BY_HAND.items() if eigenvalues == SIGNED]
)
def test_the_same_weights_in_0_1_fail(name):
    build, _ = BY_HAND[name]
    bits = torch.randint(2, (1, 200), generator=torch.Generator().manual_seed(0))
    odd = bits.cumsum(1) % 2 == 1
    assert (odd_by(*build("[0,1]"), bits) == odd).double().mean() < 0.7


def test_every_preset_with_a_signed_range_is_here():
    # the same mixers with other options, and the toy of Fig. 1, whose gates do not depend on the input
    others = {"deltanet-no-conv", "deltaproduct", "gated-deltanet", "diagonal-toy"}
    ranged = {name for name, config in PRESETS.items() if hasattr(config.mixer, "eigenvalues")}
    assert ranged - others == {name.split(",")[0] for name in BY_HAND}
