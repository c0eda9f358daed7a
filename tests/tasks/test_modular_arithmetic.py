"""Modular arithmetic: labels against Python's own arithmetic, the grammar, the sizes, the speed."""

import ast
import operator
import re
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from statetrack.errors import UserError
from statetrack.layers import model_config
from statetrack.spec import EvaluationConfig, RunSpec
from statetrack.tasks import IGNORE, BracketArithmetic, ModularArithmetic, task
from statetrack.training import build_model, evaluate
from statetrack.training.printed_rows import print_row

NAMES = ("mod-arithmetic", "mod-arithmetic-brackets", "mod-arithmetic-brackets-no-mult")
PYTHON = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def sample(name, batch, lengths, seed=0):
    return task(name).sample(batch, lengths, torch.Generator().manual_seed(seed))


def by_python(text):
    """The value of an expression, with exact integers, by the grammar of Python."""

    def value(node):
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        return PYTHON[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(text, mode="eval").body)


def expressions(of, batch):
    """Every expression of a batch as text, with the digit it is labelled with."""
    for inputs, targets in zip(*batch, strict=True):
        text = of.decode(inputs)
        (position,) = (targets != IGNORE).nonzero().flatten().tolist()
        assert text[-1] == "="
        assert text.count("=") == 1
        assert position == len(text) - 1, "the answer is asked for at ="
        yield text[:-1], int(of.symbols[targets[position]])


@pytest.mark.parametrize(("lengths", "batch"), [((3, 40), 2000), ((40, 256), 300)])
@pytest.mark.parametrize("name", NAMES)
def test_labels_are_what_python_computes(name, lengths, batch):
    for text, answer in expressions(task(name), sample(name, batch, lengths)):
        assert answer == by_python(text) % 5, text


@given(modulus=st.integers(2, 13), seed=st.integers(0, 1000))
@pytest.mark.parametrize("of", [ModularArithmetic(), BracketArithmetic()])
def test_every_modulus_is_computed_right(of, modulus, seed):
    of = replace(of, modulus=modulus)
    batch = of.sample(8, (3, 30), torch.Generator().manual_seed(seed))
    assert batch.inputs.max() < of.vocab_size == modulus + len(of.symbols) - len(of.digits)
    for inputs, targets in zip(*batch, strict=True):
        text = of.decode(inputs)[:-1]
        assert of.symbols[targets[targets != IGNORE]] == str(by_python(text) % modulus)


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("mod-arithmetic", "2-3-3*2=", "3"),
        ("mod-arithmetic-brackets", "((((3+3)+-1)+-2)-((3-(-3))+((1)+4)))=", "2"),
        ("mod-arithmetic-brackets-no-mult", "((((3+3)+-1)+-2)-((3-(-3))+((1)+4)))=", "2"),
        ("mod-arithmetic", "4*4*4=", "4"),
        ("mod-arithmetic-brackets", "(-4*(2))=", "2"),
    ],
)
def test_worked_examples_of_the_paper(name, text, answer):
    of = task(name)
    (targets,) = of.label(of.encode(text)[None]).targets
    assert targets.tolist() == [IGNORE] * (len(text) - 1) + of.encode(answer).tolist()


def test_worked_examples_of_the_docstrings():
    for of, text, inputs, target in (
        (ModularArithmetic(), "2-3-3*2=", [7, 2, 8, 2, 8, 3, 7, 4], 8),
        (BracketArithmetic(), "((3)+-1)=", [8, 8, 3, 9, 5, 6, 1, 9, 10], 2),
    ):
        batch = of.label(of.encode(text)[None])
        assert batch.inputs[0].tolist() == inputs
        assert batch.targets[0, -1] == target


def test_vocabularies_are_those_of_the_protocol():
    assert ModularArithmetic().symbols == tuple("_+-*=01234")
    assert BracketArithmetic().symbols == tuple("01234+-*()=_")
    assert [task(name).vocab_size for name in NAMES] == [10, 12, 12]
    assert {task(name).chance for name in NAMES} == {1 / 5}


def shape(text):
    """The grammar, read back: |left| of every bracketed operation, or an error."""
    if re.fullmatch(r"\d|-\d|\(\d\)|\(-\d\)", text):
        return []
    assert len(text) >= 5
    assert (text[0], text[-1]) == ("(", ")")
    inner, depth = text[1:-1], 0
    for i, symbol in enumerate(inner):
        depth += (symbol == "(") - (symbol == ")")
        # the operator: outside all brackets, after an operand (otherwise it is a sign)
        if depth == 0 and symbol in "+-*" and i > 0 and inner[i - 1] in "01234)":
            return [(i, len(text)), *shape(inner[:i]), *shape(inner[i + 1 :])]
    raise AssertionError(text)


def test_bracket_trees_follow_the_grammar_and_split_uniformly():
    splits = []
    for text, _ in expressions(BracketArithmetic(), sample("mod-arithmetic-brackets", 4000, (3, 40))):
        splits += shape(text)
    for length in (5, 6, 9, 14):
        left = torch.tensor([size for size, of in splits if of == length])
        share = torch.bincount(left, minlength=length - 3)[1:] / len(left)
        assert share.numel() == length - 4, "left has 1 to L - 4 symbols"
        spread = (1 / (length - 4) / len(left)) ** 0.5
        assert (share - 1 / (length - 4)).abs().max() <= 4 * spread


@pytest.mark.parametrize(("name", "operators"), [*zip(NAMES, ("+-*", "+-*", "+-"), strict=True)])
def test_digits_and_operators_are_uniform(name, operators):
    texts = " ".join(text for text, _ in expressions(task(name), sample(name, 2000, (3, 40))))
    digits = [texts.count(d) for d in "01234"]
    # a minus is an operator after an operand, else a sign; expressions are joined by a space
    counts = [len(re.findall(rf"(?<=[\d)])\{o}", texts)) for o in operators]
    assert len(re.findall(r"\*", texts)) == (counts[2] if "*" in operators else 0)
    for found in (digits, counts):
        mean = sum(found) / len(found)
        assert max(abs(n - mean) for n in found) < 4 * mean**0.5


@pytest.mark.parametrize(
    ("lengths", "first", "last"), [((3, 40), 3, 39), ((40, 256), 39, 255), ((5, 9), 5, 9)]
)
def test_sizes_without_brackets_are_odd_and_uniform(lengths, first, last):
    drawn = ModularArithmetic().draw_lengths(40_000, lengths, torch.Generator().manual_seed(0))
    sizes, counts = drawn.unique(return_counts=True)
    assert sizes.tolist() == list(range(first, last + 1, 2))
    expected = 40_000 / len(sizes)
    assert (counts - expected).abs().max() < 5 * expected**0.5


def test_sizes_with_brackets_are_uniform_but_at_least_5():
    drawn = BracketArithmetic().draw_lengths(38_000, (3, 40), torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn, minlength=41)[5:]
    assert drawn.min() == 5
    assert drawn.max() == 40
    assert counts[0].item() == pytest.approx(3000, rel=0.08)  # 3, 4 and 5
    assert (counts[1:] - 1000).abs().max() < 150


@pytest.mark.parametrize(("name", "extra"), [*zip(NAMES, (1, 2, 2), strict=True)])
def test_a_length_counts_the_answer(name, extra):
    """Without brackets the answer, with brackets the answer and one PAD: neither is part of the input."""
    lengths = torch.tensor([5, 39, 21])
    batch = task(name).fill(lengths, torch.Generator().manual_seed(0))
    texts = [task(name).decode(x) for x in batch.inputs]
    assert [len(text) + extra for text in texts] == lengths.tolist()
    assert batch.inputs.shape[1] == 39 - extra


def test_even_and_tiny_lengths_can_be_filled():
    """Evaluation may ask for any length in range: it stands for the next one that exists."""
    generator = torch.Generator().manual_seed(0)
    assert ModularArithmetic().fill(torch.tensor([4]), generator).inputs.shape[1] == 2
    assert BracketArithmetic().fill(torch.tensor([3]), generator).inputs.shape[1] == 3


def test_always_answering_zero_scores_above_guessing_where_there_is_multiplication():
    """PROTOCOL section 1: label 0 has probability about 0.305 at evaluation lengths, 0.13 scaled."""
    share = {}
    for name in NAMES:
        answers = torch.cat([sample(name, 4096, (40, 256), seed).targets.flatten() for seed in range(4)])
        answers = answers[answers != IGNORE]
        share[name] = (answers == task(name).encode("0").item()).double().mean().item()
    scaled = {name: (p - 0.2) / 0.8 for name, p in share.items()}
    # 16,384 samples: one standard deviation is 0.0045
    assert scaled["mod-arithmetic-brackets"] == pytest.approx(0.13, abs=0.015)
    assert abs(scaled["mod-arithmetic"]) < 0.02
    assert abs(scaled["mod-arithmetic-brackets-no-mult"]) < 0.02


def test_the_majority_baseline_is_measured_and_printed_beside_the_score(capsys):
    spec = RunSpec(
        task("mod-arithmetic-brackets"),
        model_config("diagonal-toy"),
        evaluation=EvaluationConfig(eval_samples=2048, eval_batch=1024),
    ).resolved()
    row = evaluate(build_model(spec), spec, torch.device("cpu"))
    assert row["majority_scaled_accuracy"] == pytest.approx(0.13, abs=0.05)
    print_row(7, {"loss": 1.0} | row)
    assert f"(majority answer {row['majority_scaled_accuracy']:.3f})" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_the_paper_is_drawn_quickly(name):
    """About 8 ms on one core; a training step of the smallest model takes over 100 ms."""
    sample(name, 1024, (3, 40))
    times = []
    for seed in range(5):
        started = time.perf_counter()
        sample(name, 1024, (3, 40), seed)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.06


def test_wrong_tasks_and_texts_are_refused():
    with pytest.raises(UserError, match="modulus is 1, expected 2 to 64"):
        ModularArithmetic(modulus=1)
    with pytest.raises(UserError, match=r"symbol '\(' is not known"):
        ModularArithmetic().encode("(1)=")
    with pytest.raises(UserError, match="symbol '7' is not known"):
        BracketArithmetic().encode("7=")
    with pytest.raises(UserError, match="expected 3 <= low <= high"):
        BracketArithmetic().sample(1, (2, 9), torch.Generator())


@pytest.mark.parametrize("multiplication", [True, False])
def test_trees_drawn_in_one_kernel_follow_the_grammar_and_have_the_values_of_a_calculator(
    multiplication, monkeypatch
):
    """What a GPU does, here in Triton's interpreter: the same splits, digits and operators in law."""
    of = BracketArithmetic(multiplication=multiplication)
    generator = torch.Generator().manual_seed(0)
    lengths = of.draw_lengths(300, (3, 40), generator)
    monkeypatch.setattr(BracketArithmetic, "capturable", lambda self, device: True)
    batch = of.fill(lengths, generator, 40)
    assert torch.equal(of.label(batch.inputs).targets, batch.targets)
    for text, length in zip(map(of.decode, batch.inputs), lengths.tolist(), strict=True):
        assert len(text) == max(length, 5) - 2
        shape(text.removesuffix("="))
    symbols = "".join(map(of.decode, batch.inputs))
    assert ("*" in symbols) == multiplication
    splits = [left / (size - 4) for text in map(of.decode, batch.inputs) for left, size in shape(text[:-1])]
    assert 0.5 < sum(splits) / len(splits) < 0.7  # mean of 1 .. L - 4 over L - 4, lengths mixed
