"""Decoding: milliseconds per token and tokens per second, beside other libraries on the same machine.

One token at a time from a state of constant size, greedy, after a prompt. On a GPU weights are bfloat16 and
our step is one CUDA graph; flash-linear-attention's model is called eagerly with its cache, as its
`generate` does. On a CPU both sides are eager in float32, beside the Mamba of `transformers`.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statetrack.bench.gpu_floor import peer_module
from statetrack.bench.lm_step import fla_deltanet
from statetrack.errors import UserError
from statetrack.layers import MambaConfig, Model, model_config
from statetrack.lm.generate import DecodeGraph, decode_step

Keep = Callable[[dict[str, Any]], None]
Decoder = Callable[[Tensor], Tensor]  # tokens (B,) -> the next ones (B,); holds its state


@dataclass(frozen=True)
class LmDecode:
    """Decoding with the preset `model`, `batch` rows side by side, after `prompt` tokens."""

    model: str = "deltanet-340m"
    batch: int = 1
    prompt: int = 128
    vocabulary: int = 32_000

    @property
    def name(self) -> str:
        return f"{self.model} decoding, B{self.batch}"

    def tokens(self, device: str) -> Tensor:
        return torch.randint(self.vocabulary, (self.batch, self.prompt), device=device)

    def row(self, seconds: float, who: str) -> dict[str, Any]:
        """Of a step that took `seconds`."""
        rate = self.batch / seconds
        return {"case": self.name, "who": who, "ms_per_token": 1e3 * seconds, "tokens_per_s": rate}


GPU_DECODING = [LmDecode(batch=1), LmDecode(batch=64)]
CPU_DECODING = [LmDecode("mamba-60m")]


@torch.inference_mode()
def our_decoder(case: LmDecode, device: str, graph: bool) -> Decoder:
    """Ours: on a GPU in bfloat16, on a CPU in float32."""
    torch.manual_seed(0)
    model = Model(model_config(case.model), case.vocabulary, case.vocabulary).to(device).eval()
    if device == "cuda":
        model = model.bfloat16()
    states = model(case.tokens(device))[1]
    if graph:
        step = DecodeGraph(model, states)
        return lambda tokens: step(tokens).argmax(-1)
    held = [states]

    @torch.inference_mode()
    def decode(tokens: Tensor) -> Tensor:
        logits, held[0] = decode_step(model, tokens, held[0])
        return logits.argmax(-1)

    return decode


def fla_decoder(case: LmDecode) -> Decoder:
    """flash-linear-attention's DeltaNet in bfloat16 with its cache, eager."""
    peer = fla_deltanet(case.model, case.vocabulary)
    return _cached_decoder(peer.bfloat16().eval(), "past_key_values", case.tokens("cuda"))


def transformers_mamba_decoder(case: LmDecode) -> Decoder:
    """The Mamba of `transformers` with our sizes, float32 on a CPU."""
    transformers = peer_module("transformers", "transformers")
    config = model_config(case.model)
    mixer = config.mixer
    assert isinstance(mixer, MambaConfig)
    peer = transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=case.vocabulary,
            hidden_size=config.d_model,
            num_hidden_layers=config.layers,
            state_size=mixer.d_state,
            tie_word_embeddings=config.tied,
        )
    )
    return _cached_decoder(peer.eval(), "cache_params", case.tokens("cpu"))


@torch.inference_mode()
def _cached_decoder(model: Any, cache: str, prompt: Tensor) -> Decoder:
    """A model of `transformers` that returns its cache under this name and takes it back."""
    held = [getattr(model(input_ids=prompt, use_cache=True), cache)]

    @torch.inference_mode()
    def decode(tokens: Tensor) -> Tensor:
        out = model(input_ids=tokens[:, None], use_cache=True, **{cache: held[0]})
        held[0] = getattr(out, cache)
        return out.logits[:, -1].argmax(-1)

    return decode


def seconds_per_step(decode: Decoder, batch: int, device: str, steps: int, warm_up: int) -> float:
    """The mean over `steps` tokens, each chosen from the logits before it."""
    tokens = torch.zeros(batch, dtype=torch.long, device=device)
    for _ in range(warm_up):
        tokens = decode(tokens)
    _wait(device)
    started = time.perf_counter()
    for _ in range(steps):
        tokens = decode(tokens)
    _wait(device)
    return (time.perf_counter() - started) / steps


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def decode_report(
    device: str, peers: bool, chosen: Callable[[str], bool], keep: Keep, steps: int = 64
) -> None:
    """Time every case `chosen` by name beside its peer, print, and give all rows so far to `keep`."""
    on_gpu, rows = device == "cuda", []
    for case in GPU_DECODING if on_gpu else CPU_DECODING:
        if not chosen(case.name):
            continue
        ours = "ours, CUDA graph" if on_gpu else "ours, eager"
        sides: list[tuple[str, Callable[[], Decoder]]] = [
            (ours, lambda case=case: our_decoder(case, device, graph=on_gpu))
        ]
        if peers and on_gpu:
            sides.append(("flash-linear-attention, eager", lambda case=case: fla_decoder(case)))
        elif peers:
            sides.append(("transformers, eager", lambda case=case: transformers_mamba_decoder(case)))
        for who, make in sides:
            try:
                decode = make()
            except UserError as error:  # a peer that is not installed
                print(f"{case.name:<32}{error}", flush=True)
                continue
            row = case.row(seconds_per_step(decode, case.batch, device, steps, 8), who)
            del decode
            print(
                f"{row['case']:<32}{row['ms_per_token']:>9.3f} ms per token"
                f"{row['tokens_per_s']:>12,.0f} tokens/s  {who}",
                flush=True,
            )
            rows.append(row)
            keep({"lm_decoding": rows})
            gc.collect()
