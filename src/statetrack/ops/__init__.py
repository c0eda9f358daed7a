"""The recurrences. One glossary for the whole library (the paper's letter in the last column):

    B, T, H      batch, time, heads                                -, t, -
    K, V         key and value width of a head                     n, d
    S            state of the delta rule, (B, H, K, V)             H (taken here by heads)
    q, k, v      query, key, value                                 q, k, v
    beta         step size of the delta rule, in [0, 2]            beta
    g            log of a decay, <= 0 (Gated DeltaNet)             log alpha
    a            gate of either sign, in [-1, 1]                   alpha
    D, N         channels and states per channel of Mamba          d, n
    u, delta     input and step size of Mamba, (B, D, T)           x, Delta
    h            state of Mamba, (B, D, N)                         H
    C, n, m      memory, normaliser, stabiliser of the mLSTM       H, -, -
    c, n, m      cell, normaliser, stabiliser of the sLSTM         -, -, -

Tensors of the delta rule put time before heads, (B, T, H, K); the selective scan keeps mamba-ssm's
channels-first layout, (B, D, T), so that both are drop-in replacements for the libraries they come from.

Every op is a package of this one, named like its function: `statetrack.ops.delta_rule` is the package and
`statetrack.ops.delta_rule.delta_rule` the function, which `statetrack` exports at the top.
"""

__all__ = [
    "automaton_run",
    "bracket_expressions",
    "cross_entropy",
    "delta_rule",
    "embedding",
    "gated_linear_attention",
    "generalised_delta_rule",
    "linear_cross_entropy",
    "mlstm",
    "pack",
    "rms_norm",
    "selective_scan",
    "short_convolution",
    "slstm",
    "swiglu",
]
