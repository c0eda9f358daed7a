"""Text from a language model, token by token from its state: memory does not grow with the length.

    for token in stream(model, prompt, 100): ...        one (B,) tensor after the other
    tokens = generate(model, prompt, 100)               prompt and continuation, (B, T + 100)
    logits, state = decode_step(model, tokens, state)   one step of decoding, as benchmarks time it

Attention layers are the exception: their keys and values grow with every token.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from statetrack.errors import UserError
from statetrack.layers import Model

__all__ = ["DecodeGraph", "Sampling", "decode_step", "generate", "stream", "text_pieces"]

LONGEST_CHARACTER = 8  # tokens that may have to be seen before a character is whole


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the most probable one at temperature 0, else a random one.

    `top_k` keeps the k most probable tokens (0: all), `top_p` the fewest that together
    have probability p.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, value, holds, wanted in (
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "a number from 0 up"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "a number above 0, at most 1"),
        ):
            if not holds:
                raise UserError(f"{name} is {value}, expected {wanted}.")

    def choose(self, logits: Tensor, generator: Generator | None = None) -> Tensor:
        """One token for each row of logits (B, V), (B,)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float()
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature  # which may be tiny
        order = None
        if self.top_k and self.top_k < logits.shape[-1]:
            logits, order = logits.topk(self.top_k, dim=-1)  # sorted, largest first
        if self.top_p < 1:
            if order is None:
                logits, order = logits.sort(dim=-1, descending=True)
            p = logits.softmax(-1)
            # keep a token if those before it do not reach top_p: the first one always stays
            logits = logits.masked_fill(p.cumsum(-1) - p >= self.top_p, float("-inf"))
        chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        return (chosen if order is None else order.gather(-1, chosen)).squeeze(-1)


GREEDY = Sampling(temperature=0.0)


def decode_step(model: Model, tokens: Tensor, state: Sequence[Any] | None) -> tuple[Tensor, list[Any]]:
    """One token per row, tokens (B,): logits (B, V) of the next one, and the state to continue from."""
    logits, after = model(tokens[:, None], state)
    return logits[:, -1], after


class DecodeGraph:
    """`decode_step` as one CUDA graph for one batch size; starts from `state` and keeps its own.

        step = DecodeGraph(model, state)
        logits = step(tokens)          # (B,) -> (B, V); overwritten by the next call

    Every tensor of the state must keep its shape, so models with attention are refused.
    """

    def __init__(self, model: Model, state: Sequence[Any]):
        self.state = tree_map_only(Tensor, torch.clone, list(state))
        first = _tensors(self.state)[0]
        self.tokens = torch.zeros(first.shape[0], dtype=torch.long, device=first.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.inference_mode():
            for _ in range(3):  # compiles and loads what the graph needs
                self._step(model)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph), torch.inference_mode():
            self.logits = self._step(model)
        self.set_state(state)

    def _step(self, model: Model) -> Tensor:
        logits, after = decode_step(model, self.tokens, self.state)
        for old, new in zip(_tensors(self.state), _tensors(after), strict=True):
            if old.shape != new.shape:
                raise UserError(
                    "DecodeGraph: the state of this model grows with the tokens. Use decode_step."
                )
            old.copy_(new)
        return logits

    @torch.inference_mode()
    def set_state(self, state: Sequence[Any]) -> None:
        """Continue from this state, of the same shape."""
        for old, new in zip(_tensors(self.state), _tensors(state), strict=True):
            old.copy_(new)

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.logits


def _tensors(state: Sequence[Any]) -> list[Tensor]:
    return [x for x in tree_leaves(list(state)) if isinstance(x, Tensor)]


@torch.inference_mode()
def stream(
    model: Model,
    tokens: Tensor,
    max_new_tokens: int | None = None,
    sampling: Sampling = GREEDY,
    *,
    generator: Generator | None = None,
    known: int | None = None,
    graph: bool = False,
) -> Iterator[Tensor]:
    """The tokens that follow the prompts `tokens` (B, T), one (B,) after the other; endless when None.

    Only tokens below `known` are chosen: a vocabulary may be larger than that of its tokenizer. `graph`
    replays a CUDA graph for each token.
    """
    _check(model, tokens, max_new_tokens)
    last = tokens.new_full((tokens.shape[0], 1), tokens.shape[1] - 1)
    logits, state = model(tokens, at=last)
    logits = logits[:, -1]
    step = DecodeGraph(model, state) if graph else None
    produced = 0
    while max_new_tokens is None or produced < max_new_tokens:
        chosen = sampling.choose(logits[:, :known], generator)
        yield chosen
        produced += 1
        if produced == max_new_tokens:
            return
        if step is None:
            logits, state = decode_step(model, chosen, state)
        else:
            logits = step(chosen)


def generate(
    model: Model,
    tokens: Tensor,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    *,
    generator: Generator | None = None,
    known: int | None = None,
    graph: bool = False,
) -> Tensor:
    """The prompts `tokens` (B, T) with their continuations, (B, T + max_new_tokens).

    The most probable token is taken, unless `sampling` says otherwise: Sampling(temperature=0.8, top_p=0.95),
    drawn with `generator`. Tokens from `known` on, those that only pad the vocabulary, are never chosen.
    With `graph` every step is one CUDA graph, on a GPU.

    >>> model = build("deltanet", vocab_size=10, d_model=16, heads=2)
    >>> generate(model, torch.zeros(2, 5, dtype=torch.int64), 3).shape
    torch.Size([2, 8])
    """
    new = stream(model, tokens, max_new_tokens, sampling, generator=generator, known=known, graph=graph)
    return torch.cat([tokens, *(chosen[:, None] for chosen in new)], dim=1)


def _check(model: Model, tokens: Tensor, max_new_tokens: int | None) -> None:
    if tokens.ndim != 2 or tokens.shape[1] < 1:
        raise UserError(
            f"generate: tokens has shape {tuple(tokens.shape)}, expected (batch, time) with at least one "
            "token. Give a prompt."
        )
    if max_new_tokens is not None and max_new_tokens < 0:
        raise UserError(f"generate: max_new_tokens is {max_new_tokens}, expected 0 or more.")
    vocab_size, classes = model.embedding.num_embeddings, model.head.out_features
    if vocab_size != classes:
        raise UserError(
            f"generate: the model has {vocab_size} tokens and {classes} classes, expected as many of each. "
            "Only a model that predicts its own tokens can continue a text."
        )


def text_pieces(decode: Callable[[list[int]], str], tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens as it grows, in pieces of whole characters; together they are the text of all.

    A character may take several tokens, and a token's text may depend on the one before it (a leading space):
    so the text of the last few tokens is compared with and without the newest.
    """
    before: list[int] = []  # tokens whose text is out, kept as the left context of those after them
    waiting: list[int] = []
    for token in tokens:
        waiting.append(token)
        known, whole = decode(before), decode(before + waiting)
        incomplete = whole.endswith("\ufffd") and len(waiting) < LONGEST_CHARACTER
        if len(whole) > len(known) and not incomplete:
            yield whole[len(known) :]
            before, waiting = waiting, []
    if waiting:
        rest = decode(before + waiting)[len(decode(before)) :]
        if rest:
            yield rest
