"""Models to be evaluated beside each other, with labels that tell them apart."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from statetrack.layers import AttentionConfig, DeltaNetConfig, Model, ModelConfig
from statetrack.lm.models import open_model
from statetrack.lm.tokenizers import FILE, check_same_tokenizer
from statetrack.spec import RunSpec

__all__ = [
    "Candidate",
    "Described",
    "check_tokenizer",
    "context_of",
    "describe",
    "family",
    "labels",
    "open_candidate",
    "weights_sha256",
]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A model and where it comes from."""

    model: Model
    name: str  # its folder's
    id: str  # of its run, else the name
    kind: str  # equal for runs that differ in nothing but the seed
    seed: int
    context: int  # tokens of a training sequence
    given: str = ""  # label given by the user

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


@dataclass(frozen=True)
class Described:
    """What remains of a candidate when its weights are no longer in memory."""

    family: str
    name: str
    id: str
    kind: str
    seed: int
    context: int
    parameters: int
    weights: str
    given: str = ""


def open_candidate(argument: str) -> Candidate:
    """The model in the folder of a run or of an export; "LABEL=FOLDER" gives it a label."""
    given, folder = _parts(argument)
    opened = open_model(folder)
    identity, kind, seed = opened.name, str(folder.resolve()), 0
    if (folder / "spec.json").exists():
        spec = RunSpec.load(folder / "spec.json")
        identity, kind, seed = spec.id, replace(spec, seed=0).id, spec.seed
    return Candidate(opened.model, opened.name, identity, kind, seed, opened.context, given)


def context_of(argument: str) -> int:
    """The tokens of a training sequence; of a run without reading its weights."""
    _, folder = _parts(argument)
    if (folder / "spec.json").exists():
        spec = RunSpec.load(folder / "spec.json")
        return spec.training.train_lengths[1] if spec.training.train_lengths else 0
    return open_model(folder).context


def check_tokenizer(argument: str, data: Path) -> None:
    """Refuse data of another tokenizer than the model's, where both are recorded."""
    _, folder = _parts(argument)
    if (folder / FILE).exists() and (data / FILE).exists():
        check_same_tokenizer(data, folder)


def _parts(argument: str) -> tuple[str, Path]:
    """Label and folder."""
    label, _, path = argument.rpartition("=")
    return label, Path(path)


def family(config: ModelConfig) -> str:
    """The name of a model's mixers, and their range if they have one: "DeltaNet [-1,1]"."""
    mixers = config.mixers or (config.mixer,)
    names, ranges = (dict.fromkeys(x for m in mixers if (x := of(m))) for of in (_name, _range))
    return " ".join([" + ".join(names), *ranges])


def _name(mixer: object) -> str:
    if isinstance(mixer, DeltaNetConfig):
        if mixer.householders > 1:
            return "DeltaProduct"
        return "Gated DeltaNet" if mixer.gated else "DeltaNet"
    if isinstance(mixer, AttentionConfig):
        return "attention"
    return type(mixer).__name__.removesuffix("Config")


def _range(mixer: object) -> str:
    return getattr(mixer, "eigenvalues", "")


def labels(candidates: Sequence[Described]) -> list[str]:
    """A label for each, the same for two that differ in their seed only; the folder's name where needed."""
    plain = [c.given or c.family for c in candidates]
    kinds = {(label, c.given or c.kind) for label, c in zip(plain, candidates, strict=True)}
    clashing = {label for label, n in Counter(label for label, _ in kinds).items() if n > 1}
    sized = [
        _insert(p, _size(c.parameters)) if p in clashing else p
        for p, c in zip(plain, candidates, strict=True)
    ]
    kinds = {(label, c.given or c.kind) for label, c in zip(sized, candidates, strict=True)}
    clashing = {label for label, n in Counter(label for label, _ in kinds).items() if n > 1}
    return [_insert(s, c.name) if s in clashing else s for s, c in zip(sized, candidates, strict=True)]


def describe(candidate: Candidate) -> Described:
    """Everything about a candidate but its model."""
    return Described(
        family(candidate.model.config),
        candidate.name,
        candidate.id,
        candidate.kind,
        candidate.seed,
        candidate.context,
        candidate.parameters,
        weights_sha256(candidate.model),
        candidate.given,
    )


def weights_sha256(model: Model) -> str:
    """The SHA-256 of a model's config and weights, in hexadecimal: equal models have equal ones."""
    digest = hashlib.sha256(repr(model.config).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _insert(label: str, word: str) -> str:
    """The word in front of the range."""
    before, space, eigenvalues = label.rpartition(" ")
    return f"{before} {word} {eigenvalues}" if space and eigenvalues.endswith("]") else f"{label} {word}"


def _size(parameters: int) -> str:
    """A number of parameters as people say it."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= unit:
            return (
                f"{parameters / unit:.2g}{name}"
                if parameters < 10 * unit
                else f"{parameters / unit:.0f}{name}"
            )
    return f"{parameters}"
