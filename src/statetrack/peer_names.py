"""What layers and functions of other libraries are called here: importing their names from here says it."""

import difflib
from collections.abc import Iterable
from importlib import import_module

PEER_NAMES = {
    "GatedDeltaNet": "DeltaNet(DeltaNetConfig(gated=True, output_gate=True), d_model)",
    "DeltaProduct": "DeltaNet(DeltaNetConfig(householders=2), d_model)",
    "GatedDeltaProduct": "DeltaNet(DeltaNetConfig(householders=2, gated=True, output_gate=True), d_model)",
    "KimiDeltaAttention": "KDA(KDAConfig(), d_model)",
    "GatedLinearAttention": "GLA(GLAConfig(), d_model)",
    "HGRN2Attention": "HGRN2(HGRN2Config(), d_model)",
    "RWKV7Attention": "the recurrence alone, statetrack.generalised_delta_rule; there is no layer for it",
    "MambaMixer": "Mamba(MambaConfig(), d_model)",
    "Mamba2Mixer": "Mamba2(Mamba2Config(), d_model)",
    "MambaLMHeadModel": 'build("mamba-370m", vocab_size), or statetrack convert for its weights',
    "mLSTMLayer": "MLSTM(MLSTMConfig(), d_model)",
    "sLSTMLayer": "SLSTM(SLSTMConfig(), d_model)",
    "Transformer": 'build("transformer", vocab_size)',
}
COMPAT = ("statetrack.compat.fla", "statetrack.compat.mamba_ssm")
_BEGINNINGS = ("chunk_", "fused_", "parallel_", "selective_", "mamba_")


def missing_name(name: str, known: Iterable[str]) -> Exception:
    """The error for a name that `statetrack` does not have.

    For the name of another library an `ImportError`: Python would drop the text of an `AttributeError` in
    `from statetrack import GatedDeltaNet`.
    """
    if name in PEER_NAMES:
        return ImportError(f"statetrack has no {name!r}. Here: {PEER_NAMES[name]}. More: docs/porting.md")
    if name.startswith(_BEGINNINGS):
        for module in COMPAT:
            if name in import_module(module).__all__:
                return ImportError(
                    f"statetrack has no {name!r}. It is in a submodule: from {module} import {name}"
                )
    nearest = [] if name.startswith("_") else difflib.get_close_matches(name, known, n=1)
    hint = f". Did you mean {nearest[0]!r}?" if nearest else ""
    return AttributeError(f"module 'statetrack' has no attribute {name!r}{hint}")
