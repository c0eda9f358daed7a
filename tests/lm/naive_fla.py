"""DeltaNet and Gated DeltaNet of flash-linear-attention, step by step in float64, under its names of weights.

Written from the equations of its layers (0.6.0), whose kernels need a GPU.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def logits(weights: dict[str, Tensor], settings: dict, tokens: Tensor) -> Tensor:
    """(B, T) -> (B, T, vocabulary), for the settings and weights of a folder."""
    w = {name: x.double() for name, x in weights.items()}
    attended = {} if settings["attn"] is None else dict.fromkeys(settings["attn"]["layers"], settings["attn"])
    x = w["model.embeddings.weight"][tokens]
    for i in range(settings["num_hidden_layers"]):
        layer = {
            name.removeprefix(f"model.layers.{i}."): y for name, y in w.items() if f"layers.{i}." in name
        }
        part = {name.removeprefix("attn."): y for name, y in layer.items()}
        normal = rms(x, layer["attn_norm.weight"], settings)
        x = x + (attention(part, attended[i], normal) if i in attended else delta(part, settings, normal))
        normal = rms(x, layer["mlp_norm.weight"], settings)
        gated = F.silu(normal @ layer["mlp.gate_proj.weight"].T) * (normal @ layer["mlp.up_proj.weight"].T)
        x = x + gated @ layer["mlp.down_proj.weight"].T
    x = rms(x, w["model.norm.weight"], settings)
    return x @ w["model.embeddings.weight" if settings["tie_word_embeddings"] else "lm_head.weight"].T


def rms(x: Tensor, weight: Tensor, settings: dict) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + settings["norm_eps"]).sqrt() * weight


def delta(w: dict[str, Tensor], settings: dict, x: Tensor) -> Tensor:
    heads = settings["num_heads"]
    values = settings.get("num_v_heads") or heads
    q, k, v = (x @ w[f"{name}_proj.weight"].T for name in "qkv")
    if settings["use_short_conv"]:
        q, k, v = (convolved(y, w[f"{n}_conv1d.weight"][:, 0]) for n, y in zip("qkv", (q, k, v), strict=True))
    activation = {"silu": F.silu, "relu": F.relu, "identity": lambda y: y}
    q, k = (activation[settings.get("qk_activation", "silu")](y) for y in (q, k))
    q, k, v = (y.unflatten(-1, (n, -1)) for y, n in ((q, heads), (k, heads), (F.silu(v), values)))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    q, k = (y[:, :, [i * heads // values for i in range(values)]] for y in (q, k))
    beta = torch.sigmoid(x @ w["b_proj.weight"].T) * (2 if settings["allow_neg_eigval"] else 1)
    decay = torch.ones_like(beta)
    if "A_log" in w:
        decay = torch.exp(-w["A_log"].exp() * F.softplus(x @ w["a_proj.weight"].T + w["dt_bias"]))
    S = x.new_zeros(len(x), values, k.shape[-1], v.shape[-1])
    outputs = []
    for t in range(x.shape[1]):
        S = S * decay[:, t, :, None, None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bhk,bhv->bhkv", beta[:, t, :, None] * k[:, t], error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) / k.shape[-1] ** 0.5)
    o = rms(torch.stack(outputs, 1), w["o_norm.weight"], settings).flatten(-2)
    if settings["use_gate"]:
        activation = {"swish": F.silu, "sigmoid": torch.sigmoid}
        o = o * activation[settings.get("output_gate_activation", "swish")](x @ w["g_proj.weight"].T)
    return o @ w["o_proj.weight"].T


def convolved(x: Tensor, taps: Tensor) -> Tensor:
    width = taps.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    return sum(padded[:, i : i + x.shape[1]] * taps[:, i] for i in range(width))


def attention(w: dict[str, Tensor], spec: dict, x: Tensor) -> Tensor:
    heads, shared = spec["num_heads"], spec["num_kv_heads"]
    q, k, v = (x @ w[f"{name}_proj.weight"].T for name in "qkv")
    if spec["qkv_bias"]:
        q, k, v = (y + w[f"{n}_proj.bias"] for n, y in zip("qkv", (q, k, v), strict=True))
    q, k, v = (y.unflatten(-1, (n, -1)).transpose(1, 2) for y, n in ((q, heads), (k, shared), (v, shared)))
    q, k = (rotated(y, spec["rope_theta"]) for y in (q, k))
    k, v = (y.repeat_interleave(heads // shared, 1) for y in (k, v))
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    unseen = (distance < 0) | (distance >= (spec["window_size"] or x.shape[1]))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(unseen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2) @ w["o_proj.weight"].T


def rotated(x: Tensor, base: float) -> Tensor:
    """Pairs (j, j + K/2) of channels as complex numbers, turned by t base^(-2j/K)."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2])[:, None] * base ** (-torch.arange(half).double() / half)
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)
