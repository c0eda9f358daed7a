"""Write problems of reasoning-gym as JSON lines: {"family", "text"}, 57 families of mathematics and logic.

    python generate_math.py OUT.jsonl        in an environment of its own: generator-requirements.txt

The families are those whose items depend on the seed alone, checked by two runs with different hash seeds,
and take less than 50 ms each. A document is about 12,000 characters of one family.
"""

import json
import sys

import reasoning_gym

SEED = 20_261_116
CHARACTERS = 300_000  # of a family
DOCUMENT = 12_000
FAMILIES = [
    "advanced_geometry",
    "aiw",
    "base_conversion",
    "basic_arithmetic",
    "binary_alternation",
    "binary_matrix",
    "bitwise_arithmetic",
    "calendar_arithmetic",
    "chain_sum",
    "circuit_logic",
    "coin_flip",
    "complex_arithmetic",
    "count_bits",
    "count_primes",
    "course_schedule",
    "cryptarithm",
    "decimal_arithmetic",
    "decimal_chain_sum",
    "dice",
    "family_relationships",
    "fraction_simplification",
    "gcd",
    "graph_color",
    "gsm_symbolic",
    "knights_knaves",
    "largest_island",
    "lcm",
    "leg_counting",
    "letter_counting",
    "manipulate_matrix",
    "modulo_grid",
    "n_queens",
    "number_filtering",
    "number_format",
    "number_sequence",
    "number_sorting",
    "path_star",
    "polynomial_equations",
    "pool_matrix",
    "power_function",
    "prime_factorization",
    "products",
    "propositional_logic",
    "quantum_lock",
    "rotate_matrix",
    "rotten_oranges",
    "self_reference",
    "shortest_path",
    "simple_equations",
    "simple_geometry",
    "simple_integration",
    "spiral_matrix",
    "string_manipulation",
    "survo",
    "syllogism",
    "time_intervals",
    "tower_of_hanoi",
]


def main() -> None:
    """Write all families to the file named on the command line."""
    with open(sys.argv[1], "w") as out:
        for family in FAMILIES:
            items = reasoning_gym.create_dataset(family, size=CHARACTERS // 20, seed=SEED)
            written, index, text = 0, 0, ""
            while written < CHARACTERS:
                item = items[index]
                text += f"Question: {item['question'].strip()}\nAnswer: {item['answer']}\n\n"
                index += 1
                if len(text) >= DOCUMENT:
                    out.write(json.dumps({"family": family, "text": text}) + "\n")
                    written, text = written + len(text), ""


if __name__ == "__main__":
    main()
