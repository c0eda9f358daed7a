"""Facts of every task as a table typed by hand, and labels counted by loops that know nothing of the code."""

import itertools

import pytest
import torch

from statetrack.automata import DFA
from statetrack.tasks import IGNORE, TASKS, Automaton, Batch, WordProblem, answer_positions, group, task

FORMAL_EDGES = (40, 64, 96, 128, 192, 256)
WORD_LENGTHS = (32, 64, 128, 256)
# labels, vocabulary, classes, chance, training lengths, evaluation lengths, shortest, can be drawn in a graph
FACTS = {
    "parity": ("last", 3, 3, 1 / 2, (3, 40), FORMAL_EDGES, 2, True),
    "parity-dense": ("dense", 3, 3, 1 / 2, (32, 32), WORD_LENGTHS, 1, True),
    "mod-arithmetic": ("last", 10, 10, 1 / 5, (3, 40), FORMAL_EDGES, 3, True),
    "mod-arithmetic-brackets": ("last", 12, 12, 1 / 5, (3, 40), FORMAL_EDGES, 3, False),
    "mod-arithmetic-brackets-no-mult": ("last", 12, 12, 1 / 5, (3, 40), FORMAL_EDGES, 3, False),
    "word-problem": ("dense", 121, 121, 1 / 120, (32, 32), WORD_LENGTHS, 1, True),
    "s5": ("dense", 121, 121, 1 / 120, (32, 32), WORD_LENGTHS, 1, True),
    "s5-swaps": ("dense", 121, 121, 1 / 120, (32, 32), WORD_LENGTHS, 1, True),
    "s5-up-to-3": ("dense", 121, 121, 1 / 120, (32, 32), WORD_LENGTHS, 1, True),
    "s5-4-tokens": ("dense", 122, 122, 1 / 120, (32, 32), WORD_LENGTHS, 1, True),
    "z60": ("dense", 61, 61, 1 / 60, (32, 32), WORD_LENGTHS, 1, True),
    "z60-2-tokens": ("dense", 62, 62, 1 / 60, (32, 32), WORD_LENGTHS, 1, True),
}


def draw(name, batch, lengths, seed=0):
    return task(name).sample(batch, lengths, torch.Generator().manual_seed(seed))


def test_the_table_lists_every_task():
    assert set(FACTS) <= set(TASKS)


@pytest.mark.parametrize("name", FACTS)
def test_facts_of_a_task(name):
    of = task(name)
    assert (
        of.labels,
        of.vocab_size,
        of.n_classes,
        of.chance,
        of.train_lengths,
        of.eval_lengths,
        of.shortest,
        of.capturable(torch.device("cpu")),
    ) == FACTS[name]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("word-problem", ("S5", "all", 1)),
        ("parity-dense", ("S2", "all", 1)),
        ("s5", ("S5", "all", 1)),
        ("s5-swaps", ("S5", "swaps", 1)),
        ("s5-up-to-3", ("S5", "up-to-3", 1)),
        ("s5-4-tokens", ("S5", "all", 4)),
        ("z60", ("Z60", "all", 1)),
        ("z60-2-tokens", ("Z60", "all", 2)),
    ],
)
def test_word_problems_by_name(name, fields):
    of = task(name)
    assert (of.group, of.inputs, of.tokens_per_element) == fields


@pytest.mark.parametrize("name", FACTS)
def test_tokens_and_labels_stay_within_the_vocabulary_and_use_all_of_it(name):
    """Every token that can occur does, in enough sequences; so does every label."""
    of = task(name)
    lengths = (3, 40) if of.labels == "last" else (40, 40)
    inputs, targets = draw(name, 600, lengths)
    labels = set(targets.flatten().tolist()) - {IGNORE}
    tokens = set(inputs.flatten().tolist())
    assert max(tokens) < of.vocab_size
    assert max(labels) < of.n_classes
    if of.labels == "dense":
        assert labels == set(range(group(of.group).order)) | {of.bos}
    expected = {
        "parity": {0, 1, 2},
        "mod-arithmetic": set(range(10)),
        "mod-arithmetic-brackets": set(range(12)),
        "mod-arithmetic-brackets-no-mult": set(range(12)) - {7},
        "parity-dense": {0, 1, 2},
        "s5-4-tokens": set(range(122)),
        "z60": set(range(61)),
        "z60-2-tokens": set(range(62)),
    }
    if name in expected:
        assert tokens == expected[name]


@pytest.mark.parametrize("name", ["parity", "mod-arithmetic", "mod-arithmetic-brackets"])
def test_a_fresh_batch_of_mixed_lengths_has_the_width_of_the_longest_possible(name):
    """So that its shape is known before anything is drawn; one label per sequence, at its last token."""
    extra = {"parity": 1, "mod-arithmetic": 2, "mod-arithmetic-brackets": 2}[name]
    for seed in range(8):
        inputs, targets = draw(name, 3, (5, 30), seed)
        assert inputs.shape == targets.shape == (3, 30 - extra)
    padding = 11 if "brackets" in name else 0
    for tokens, labels in zip(inputs.tolist(), targets.tolist(), strict=True):
        used = [t for t in tokens if t != padding]
        assert [i for i, y in enumerate(labels) if y != IGNORE] == [len(used) - 1]


@pytest.mark.parametrize("name", [*FACTS, "live"])
def test_a_batch_depends_on_its_generator_alone(name):
    of = Automaton.of(DFA.from_regex("(ab|ba)*", "ab"), "live") if name == "live" else task(name)
    batches = []
    for global_seed in range(3):
        torch.manual_seed(global_seed)
        batches.append(of.sample(6, (5, 20), torch.Generator().manual_seed(4)))
    assert all(torch.equal(batches[0].inputs, batch.inputs) for batch in batches)
    assert all(torch.equal(batches[0].targets, batch.targets) for batch in batches)


def test_answers_are_found_wherever_they_are():
    targets = torch.tensor([[IGNORE, 3, IGNORE], [0, IGNORE, IGNORE], [IGNORE, IGNORE, 1]])
    assert answer_positions(targets).tolist() == [[1], [0], [2]]


def test_dense_lengths_are_one_per_batch_and_uniform():
    lengths = [draw("s5", 3, (2, 5), seed).inputs.shape[1] - 1 for seed in range(400)]
    assert set(lengths) == {2, 3, 4, 5}
    assert all(60 < lengths.count(n) < 140 for n in (2, 3, 4, 5))


def test_the_shortest_lengths_can_be_drawn():
    assert draw("parity", 4, (2, 2)).inputs.shape == (4, 1)
    assert draw("mod-arithmetic", 4, (3, 3)).inputs.shape == (4, 2)
    assert draw("s5", 4, (1, 1)).inputs.shape == (4, 2)


@pytest.mark.parametrize("name", FACTS)
def test_a_batch_may_hold_one_sequence(name):
    even = Automaton.of(DFA("ab", {"a": [1, 0], "b": [0, 1]}, 0, [0]))
    for lengths in ((6, 6), (6, 8)):
        assert len(draw(name, 1, lengths).inputs) == 1
        assert len(even.sample(1, lengths, torch.Generator()).inputs) == 1


def test_labels_past_a_sequence_do_not_count_in_a_wider_batch():
    for name in ("s5", "s5-4-tokens"):
        batch = task(name).fill(torch.full((3,), 5), torch.Generator().manual_seed(0), width=9)
        assert batch.inputs.shape == (3, 10)
        assert ((batch.targets != IGNORE).sum(1) == 6).all()
        assert (batch.targets[:, 6:] == IGNORE).all()
        assert (batch.targets[:, :6] != IGNORE).all()
    even = Automaton.of(DFA("ab", {"a": [1, 0], "b": [0, 1]}, 0, [0]))
    for words in ("uniform", "live"):
        batch = Automaton(even.automaton, words).fill(
            torch.full((3,), 5), torch.Generator().manual_seed(0), width=9
        )
        assert ((batch.targets != IGNORE).sum(1) == 6).all()
        assert batch.inputs.shape == (3, 10)


def test_parity_in_a_wider_batch_is_padded():
    inputs, targets = task("parity").fill(torch.tensor([3, 6]), torch.Generator().manual_seed(0), width=9)
    assert inputs.shape == (2, 8)
    assert [(row != 0).sum().item() for row in inputs] == [2, 5]
    assert [(row != IGNORE).nonzero().item() for row in targets] == [1, 4]


def by_hand(symbols, tokens, modulus):
    """The value of an expression without brackets: products first, then the sum, from left to right."""
    text = "".join(symbols[t] for t in tokens).split("=")[0]
    terms, sign, i = [], 1, 0
    while i < len(text):
        if text[i] in "+-":
            sign = 1 if text[i] == "+" else -1
            i += 1
            continue
        value = int(text[i])
        i += 1
        while i < len(text) and text[i] == "*":
            value *= int(text[i + 1])
            i += 2
        terms.append(sign * value)
    return sum(terms) % modulus


def test_answers_of_arithmetic_by_a_loop():
    of = task("mod-arithmetic")
    for tokens, labels in zip(*(x.tolist() for x in draw("mod-arithmetic", 300, (3, 31), 5)), strict=True):
        (label,) = [y for y in labels if y != IGNORE]
        assert label == 5 + by_hand(of.symbols, tokens, 5)


@pytest.mark.parametrize("name", ["s5-4-tokens", "z60-2-tokens"])
def test_late_labels_by_a_loop(name):
    """Position i (0-based) shows the product of the elements at positions up to i - (k - 1)."""
    of = task(name)
    then, k = group(of.group).then, of.tokens_per_element
    for tokens, labels in zip(*(x.tolist() for x in draw(name, 20, (23, 23), 2)), strict=True):
        assert (tokens[0], labels[0]) == (of.bos, of.bos)
        assert of.bos == of.filler + 1
        for i in range(23):
            assert (tokens[1 + i] == of.filler) == (i % k != 0)
            product = 0
            for j in range(0, i - (k - 1) + 1, k):
                product = int(then[product, tokens[1 + j]])
            assert labels[1 + i] == product


@pytest.mark.parametrize(("inputs", "most"), [("swaps", 2), ("up-to-3", 3), ("all", 5)])
def test_elements_drawn_move_few_points_by_a_count(inputs, most):
    elements = list(itertools.permutations(range(5)))
    allowed = {i for i, p in enumerate(elements) if sum(a != b for a, b in enumerate(p)) <= most}
    batch = WordProblem("S5", inputs=inputs).sample(400, (30, 30), torch.Generator().manual_seed(0))
    assert set(batch.inputs[:, 1:].flatten().tolist()) == allowed


@pytest.mark.parametrize("name", ["S1", "S2", "S3", "S4", "A3", "A4", "A5"])
def test_tables_of_permutation_groups_by_composition(name):
    n = int(name[1])
    elements = [
        p
        for p in itertools.permutations(range(n))
        if name[0] == "S" or sum(p[i] > p[j] for i in range(n) for j in range(i + 1, n)) % 2 == 0
    ]
    g = group(name)
    assert (g.name, g.order, g.generators) == (name, len(elements), None)
    assert g.moved.tolist() == [sum(a != i for i, a in enumerate(p)) for p in elements]
    for a, b in itertools.product(range(min(24, g.order)), repeat=2):
        composed = tuple(elements[b][i] for i in elements[a])
        assert elements[g.then[a, b]] == composed


def test_a_generated_group_lists_its_generators():
    g = group("1 0 2; 1 2 0")
    assert (g.name, g.order) == ("1 0 2; 1 2 0", 6)
    elements = list(itertools.permutations(range(3)))
    assert [elements[i] for i in g.generators] == [(1, 0, 2), (1, 2, 0)]
    assert group("1 0; 1 0").generators == (1,)
    assert group("1 2 0").order == 3


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9])
def test_prefix_products_of_every_length(length):
    g = group("S4")
    x = torch.randint(24, (6, length), generator=torch.Generator().manual_seed(0))
    y = g.prefix_products(x)
    for tokens, products in zip(x.tolist(), y.tolist(), strict=True):
        product = tokens[0]
        assert products[0] == product
        for token, expected in zip(tokens[1:], products[1:], strict=True):
            product = int(g.then[product, token])
            assert expected == product


def test_moves_are_the_products_on_the_other_side():
    g = group("S3")
    moves = g.moves(torch.device("cpu"))
    assert all(moves[b, a] == g.then[a, b] for a in range(6) for b in range(6))


def test_the_largest_group_that_is_allowed():
    from statetrack.tasks.groups import LARGEST

    assert LARGEST == 5040 == group("Z5040").order
    assert group("A7").order == 2520


def test_letters_of_a_live_word_keep_acceptance_open_by_a_loop():
    """(ab|ba)* from its start: after every pair the word is accepted, and both letters stay possible."""
    dfa = DFA.from_regex("(ab|ba)*", "ab")
    inputs, _ = Automaton.of(dfa, "live").sample(4000, (40, 40), torch.Generator().manual_seed(1))
    whole = [row for row in inputs[:, 1:].tolist() if all(a != b for a, b in zip(row[::2], row[1::2]))]
    # half stay live to the end; of the others some leave late, or by chance not at all
    assert 0.5 < len(whole) / 4000 < 0.58
    firsts = [row[i] for row in whole for i in range(0, 40, 2)]
    assert abs(sum(firsts) / len(firsts) - 0.5) < 0.01, "each pair begins with either letter"


def test_where_nothing_is_open_live_words_are_uniform():
    """After ab or anything else the language {ab} is settled: every letter is as good as another."""
    inputs, _ = Automaton.of(DFA.from_regex("ab", "abc"), "live").sample(
        3000, (8, 8), torch.Generator().manual_seed(0)
    )
    assert set(inputs[:, 1:3].flatten().tolist()) >= {0, 1}
    for t in (5, 8):
        share = torch.bincount(inputs[:, t], minlength=3) / 3000
        assert (share - 1 / 3).abs().max() < 0.05


def test_half_of_the_live_words_turn_uniform_at_a_place_that_is_uniform():
    """[ab]*abba[ab]* never closes before abba: words that turn uniform early meet it, live ones never do."""
    dfa = DFA.from_regex("(ab|ba)*", "ab")
    sink = next(q for q in range(dfa.n_states) if all(t[q] == q for t in dfa.transitions.values()))
    _, targets = Automaton.of(dfa, "live").sample(4000, (60, 60), torch.Generator().manual_seed(0))
    dead = (targets == sink).double().mean(0)
    # a word is free from place t on with probability 1 / 120 per place, and then soon dead
    for t in (20, 40, 60):
        assert dead[t].item() == pytest.approx(max(0.0, (t - 3) / 120), abs=0.035)


def test_the_automaton_task_by_its_facts():
    of = task("regex:(ab|ba)*", "ab")
    assert (of.labels, of.bos, of.vocab_size, of.n_classes) == ("dense", 2, 3, 4)
    assert (of.train_lengths, of.eval_lengths, of.words) == ((32, 32), WORD_LENGTHS, "uniform")
    assert isinstance(of.sample(2, (4, 4), torch.Generator()), Batch)
    unreachable = DFA("a", {"a": [0, 1]}, 0, [0])
    assert Automaton.of(unreachable).chance == 1.0


@pytest.mark.parametrize("modulus", [2, 64])
def test_the_ends_of_the_allowed_moduli(modulus):
    from statetrack.errors import UserError
    from statetrack.tasks import ModularArithmetic

    assert ModularArithmetic(modulus).chance == 1 / modulus
    with pytest.raises(UserError, match="modulus is"):
        ModularArithmetic(1 if modulus == 2 else 65)


def test_texts_are_read_and_written():
    of = task("mod-arithmetic")
    assert of.encode("2 - 3*4 =").tolist() == [7, 2, 8, 3, 9, 4]
    assert of.decode(torch.tensor([7, 2, 8, 3, 9, 4, 0, 0])) == "2-3*4="


def test_an_unknown_way_to_draw_words_is_refused():
    from statetrack.errors import UserError

    even = DFA("ab", {"a": [1, 0], "b": [0, 1]}, 0, [0])
    with pytest.raises(UserError, match="Did you mean 'live'"):
        Automaton.of(even, "lives")
