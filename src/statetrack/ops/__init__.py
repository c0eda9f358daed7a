"""The recurrences. One glossary for the whole library (the paper's letter in the last column):

    B, T, H      batch, time, heads                                -, t, -
    K, V         key and value width of a head                     n, d
    S            state of the delta rule, (B, H, K, V)             H (taken here by heads)
    q, k, v      query, key, value                                 q, k, v
    beta         step size of the delta rule, in [0, 2]            beta
    g            log of a decay, <= 0 (Gated DeltaNet)             log alpha
    D, N         channels and states per channel of Mamba          d, n
    u, delta     input and step size of Mamba, (B, D, T)           x, Delta
    h            state of Mamba, (B, D, N)                         H
    C, n, m      memory, normaliser, stabiliser of the mLSTM       H, -, -
    c, n, m      cell, normaliser, stabiliser of the sLSTM         -, -, -

Tensors of the delta rule put time before heads, (B, T, H, K); the selective scan keeps mamba-ssm's
channels-first layout, (B, D, T), so that both are drop-in replacements for the libraries they come from.
"""

from statetrack.ops.automaton_run import run_automaton
from statetrack.ops.checks import checked
from statetrack.ops.cross_entropy import cross_entropy
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.embedding import embedding
from statetrack.ops.mlstm import mlstm
from statetrack.ops.pack import pack
from statetrack.ops.rms_norm import add_rms_norm, rms_norm
from statetrack.ops.selective_scan import selective_scan
from statetrack.ops.short_convolution import convolved_split, short_convolution
from statetrack.ops.slstm import slstm
from statetrack.ops.swiglu import swiglu

__all__ = [
    "add_rms_norm",
    "checked",
    "convolved_split",
    "cross_entropy",
    "delta_rule",
    "embedding",
    "mlstm",
    "pack",
    "rms_norm",
    "run_automaton",
    "selective_scan",
    "short_convolution",
    "slstm",
    "swiglu",
]
