"""statetrack lm generate: continue a prompt, and print the text as it comes."""

import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from statetrack.commands.flags import parse, take_model
from statetrack.errors import UserError
from statetrack.lm.generate import Sampling, stream, text_pieces
from statetrack.lm.models import OpenedModel, open_model
from statetrack.spec import check_seed
from statetrack.training.loop import resolve_device


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a prompt with a language model: `statetrack lm generate MODEL --prompt TEXT`.

    MODEL is the folder of a run or of an exported model. The text is printed as it comes, until the model
    ends the document or there are --max-new-tokens. Memory does not grow with its length, unless the model
    has attention layers.
    """

    prompt: str = ""  # "-" reads it from the standard input; an empty one starts a new document
    max_new_tokens: int = 200  # where the text ends at the latest
    temperature: float = 1.0  # 0 takes the most probable token each time
    top_k: int = 0  # choose among the k most probable tokens only; 0 for all
    top_p: float = 1.0  # choose among the fewest tokens that together have this probability
    seed: int = 0  # of the random choices
    device: str = "auto"  # auto, cpu or cuda
    cuda_graph: bool = False  # on a GPU, launch each token as one CUDA graph
    tokenizer: Path | None = None  # tokenizer.json, where MODEL has none


def main(arguments: Sequence[str]) -> None:
    folder, flags = take_model(arguments, "lm generate")
    options = parse(GenerateOptions, flags, "statetrack lm generate MODEL")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    device = resolve_device(options.device)
    # wrong options are found before the model is loaded, a wrong tokenizer before anything is printed
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    check_seed("lm generate: seed", options.seed)
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"lm generate: the prompt is not text in UTF-8: {error.reason}.") from error
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the terminal cannot show
    opened = open_model(folder, tokenizer=options.tokenizer)
    opened.model.to(device)
    decode = opened.tokenizer.decode
    sys.stdout.write(prompt)
    try:
        for piece in text_pieces(decode, _tokens(opened, prompt, sampling, options, device)):
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:  # also when the user stops it
        sys.stdout.write("\n")
        sys.stdout.flush()


def _tokens(
    opened: OpenedModel, prompt: str, sampling: Sampling, options: GenerateOptions, device: torch.device
) -> Iterator[int]:
    """The tokens after the prompt, up to the end of the document."""
    end = opened.tokenizer.end_of_document
    start = opened.tokenizer.encode(prompt) or [end]
    new = stream(
        opened.model,
        torch.tensor([start], device=device),
        options.max_new_tokens,
        sampling,
        generator=torch.Generator(device).manual_seed(options.seed),
        known=opened.tokenizer.vocab_size,
        graph=options.cuda_graph and device.type == "cuda",
    )
    for chosen in new:
        token = int(chosen)
        if token == end:
            return
        yield token
