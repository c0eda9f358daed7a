"""Float32 tiles as bfloat16 digits: the PTX that splits them, and what the digits give, without a GPU."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ptx import carry_out, on_cpu

from statetrack.ops.delta_rule.triton import split_bf16

CONSTANTS = {name: getattr(value, "value", None) for name, value in vars(split_bf16).items()}
PTX = {name: text for name, text in CONSTANTS.items() if isinstance(text, str) and "cvt.rn.bf16x2" in text}
PROGRAMS = {text.count("cvt.rn.bf16x2"): text for text in PTX.values()}
FUNCTIONS, DOT = on_cpu(split_bf16)


def function(*uses):
    """The module's function that uses one of these names: functions may be renamed."""
    (found,) = [f for f in FUNCTIONS.values() if set(uses) & set(f.__code__.co_names)]
    return found


split, product, resolvent = function(*PTX), function("dot"), function("arange")


def numbers(count=4096, seed=0):
    """Float32 numbers of either sign and all magnitudes, with mantissas that need every bit."""
    generator = np.random.default_rng(seed)
    exponent = generator.uniform(-110, 120, count)
    signs = generator.choice([-1.0, 1.0], count)
    return torch.from_numpy((signs * 2.0**exponent).astype(np.float32))


def test_there_is_one_program_for_two_digits_and_one_for_three():
    assert sorted(PROGRAMS) == [2, 3]


@pytest.mark.parametrize(("count", "bits"), [(1, 8), (2, 16), (3, 24)])
def test_digits_sum_to_the_number(count, bits):
    """Each digit is the remainder so far, rounded to 8 bits: one digit is good to 2^-8, three are float32."""
    x = numbers()
    digits = split(x, count, False)
    assert len(digits) == count
    assert all(d.dtype == torch.bfloat16 for d in digits)
    error = (sum(d.double() for d in digits) - x.double()).abs()
    assert (error <= 2.0**-bits * x.double().abs()).all()


@pytest.mark.parametrize("count", [2, 3])
def test_every_digit_is_the_remainder_rounded_to_nearest(count):
    """torch rounds to bfloat16 as cvt.rn does, so digit by digit the PTX must give the same bits."""
    x, digits = numbers(seed=1), split(numbers(seed=1), count, False)
    rest = x.clone()
    for digit in digits:
        expected = rest.bfloat16()
        assert torch.equal(digit.view(torch.int16), expected.view(torch.int16))
        rest = rest - expected.float()


@pytest.mark.parametrize("count", [2, 3])
def test_the_first_element_of_a_pair_is_in_the_lower_half(count):
    one, two = (np.array([v], np.float32).view(np.uint32) for v in (1.0, -2.5))
    first, *rest = carry_out(PROGRAMS[count], count, [one, two])
    assert first == 0x3F80 | 0xC020 << 16  # the bfloat16 patterns of 1 and -2.5
    assert not any(d.item() & 0x7FFF7FFF for d in rest)  # both are exact: no remainder


@pytest.mark.parametrize("count", [2, 3])
def test_the_ends_of_the_range_are_split(count):
    """Zeros keep their sign, the largest bfloat16 is exact, below the smallest one only that much is lost."""
    largest, smallest, denormal = 3.3895313892515355e38, 2.0**-133, 2.0**-149
    x = torch.tensor(
        [0.0, -0.0, largest, -largest, smallest, -smallest, denormal, 3.1e-39, -1.1e-38, 1.2e-38]
    )
    digits = split(x, count, False)
    assert torch.equal(digits[0][:2].signbit(), torch.tensor([False, True]))
    total = sum(d.double() for d in digits)
    assert torch.equal(total[:6], x[:6].double())
    assert (total - x.double()).abs().max() <= smallest / 2


def test_ties_go_to_the_even_digit():
    x = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8])  # half-way between two bfloat16 numbers
    assert split(x, 2, False)[0].tolist() == [1.0, 1 + 2.0**-6]


@pytest.mark.parametrize(
    ("places", "products", "bound"), [(1, 1, 2.0**-7), (2, 3, 2.0**-15), (3, 6, 2.0**-22)]
)
def test_a_product_takes_the_digit_pairs_that_matter(places, products, bound):
    """Digits a and b meet where a + b < places: one, three or six products; the error is that of the rest."""
    generator = torch.Generator().manual_seed(0)
    x, y, total = (torch.randn(16, 16, generator=generator) for _ in range(3))
    DOT.count = 0
    found = product(split(x, places, False), split(y, places, False), total, places)
    assert DOT.count == products
    sizes = x.double().abs() @ y.double().abs() + total.double().abs()
    error = (found.double() - (total.double() + x.double() @ y.double())).abs() / sizes
    assert error.max() < bound
    if places > 1:  # one place fewer would not do
        assert _error_with(places - 1, x, y, total, sizes) > bound


def test_a_bfloat16_tile_is_its_own_digit_and_meets_every_digit_of_the_other():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 16, generator=generator), torch.randn(16, 16, generator=generator).bfloat16()
    (own,) = split(y, 3, False)
    assert own is y
    for left, right in ((split(x, 3, False), (own,)), ((own,), split(x, 3, False))):
        DOT.count = 0
        found = product(left, right, None, 3)
        assert DOT.count == 3
        exact = x.double() @ y.double() if left[0] is not y else y.double() @ x.double()
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=2.0**-20)


def _error_with(places, x, y, total, sizes):
    found = product(split(x, places, False), split(y, places, False), total, places)
    return ((found.double() - (total.double() + x.double() @ y.double())).abs() / sizes).max()


def _keys(kind, generator):
    keys = F.normalize(torch.randn(16, 8, generator=generator, dtype=torch.float64), dim=-1)
    return {
        "random": keys,
        "one key": keys[:1].expand(16, -1),
        "two keys in turns": keys[:2].repeat(8, 1),
        "nearly one key": F.normalize(keys[:1] + 1e-3 * keys, dim=-1),
    }[kind]


@pytest.mark.parametrize("kind", ["random", "one key", "two keys in turns", "nearly one key"])
@pytest.mark.parametrize("low", [1e-6, 0.5, 1.5, 2.0])
@pytest.mark.parametrize(("places", "bound"), [(2, 2.0**-14), (3, 2.0**-20)])
def test_the_resolvent_keeps_its_digits_near_reflections(kind, low, places, bound):
    """G = P (I + diag(b) P)^-1, P the products of keys below the diagonal, against float64; b in [1.5, 2] is
    where transitions come near reflections, and one key again and again where errors would add up."""
    generator = torch.Generator().manual_seed(3)
    keys = _keys(kind, generator)
    b = low + (2 - low if low >= 0.5 else low) * torch.rand(16, generator=generator, dtype=torch.float64)
    P = (keys @ keys.T).tril(-1).float()
    G = resolvent(P, P.T.contiguous(), b.float(), places, False)
    exact = P.double() @ torch.linalg.inv(
        torch.eye(16, dtype=torch.float64) + b.float().double()[:, None] * P.double()
    )
    assert (G.double() - exact).abs().max() < bound * exact.abs().max()
    assert torch.equal(G, G.tril(-1)), "strictly lower, as P is"
