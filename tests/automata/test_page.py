"""The page of `explain --html` in a real browser: click through words and read the states off the page."""

import random

import machines
import pytest

from statetrack.automata import DFA, explain
from statetrack.automata.export import read_word
from statetrack.cli import main
from statetrack.report.automaton_page import example_word, spell, write_automaton_page


def write(path, dfa, name="test"):
    write_automaton_page(path, name, explain(dfa), [], 16)
    return path


MACHINES = {
    "second to last b": machines.SECOND_TO_LAST_B,
    "star-free": DFA.from_regex("[ab]*abba[ab]*", "ab"),
    "mixed": DFA.from_regex("([ab]{3})*a", "ab"),
    "S3": DFA.from_group("S3"),
    "Z6": DFA.from_group("Z6"),
    "unreachable states": DFA("ab", {"a": [3, 0, 1, 4, 3], "b": [0, 2, 2, 0, 4]}, 0, [4]),
    "odd letters": DFA.from_permutations({"<b>": [1, 2, 0], "&": [1, 0, 2], '"': [0, 1, 2]}),
}


@pytest.mark.parametrize("name", MACHINES)
def test_every_network_shows_the_automatons_states_step_by_step(name, browser, tmp_path):
    dfa = MACHINES[name]
    browser.open(write(tmp_path / "page.html", dfa))
    rng = random.Random(7)
    for i in range(browser.evaluate("data.networks.length")):
        browser.evaluate(f"at('network').value = {i}; at('network').dispatchEvent(new Event('change'))")
        word = machines.random_word(rng, dfa, 7)
        browser.type("#word", spell(tuple(word), dfa))
        shown = [int(browser.text("#state"))]
        for _ in word:
            browser.click("#step")
            shown.append(int(browser.text("#state")))
        assert shown == dfa.run(word)
        assert browser.evaluate("document.querySelector('.picture .now').id") == f"state-{shown[-1]}"
        assert browser.text("#answer") == ("accepting" if dfa.accepts(word) else "not accepting")
        assert "same" in browser.text("#agrees")
    assert browser.errors == []


def test_first_back_step_and_last_move_through_the_word(browser, tmp_path):
    dfa = machines.SECOND_TO_LAST_B
    browser.open(write(tmp_path / "page.html", dfa), "word=abbab&at=2")
    states = dfa.run("abbab")
    place = 2
    for button, target in (("last", 5), ("back", 4), ("back", 3), ("step", 4), ("first", 0), ("step", 1)):
        browser.click(f"#{button}")
        place = target
        assert browser.text("#state") == str(states[place])
        assert browser.text("#place") == f"{place} of 5 letters read"
    browser.click("#first")
    assert browser.evaluate("at('back').disabled && at('first').disabled && !at('step').disabled")


def test_keys_move_through_the_word_and_keep_working_at_its_ends(browser, tmp_path):
    dfa = machines.SECOND_TO_LAST_B
    browser.open(write(tmp_path / "page.html", dfa), "word=abb")
    browser.evaluate("at('step').focus()")
    for key, place in (("ArrowRight", 1), ("End", 3), ("ArrowLeft", 2), ("Home", 0), ("ArrowRight", 1)):
        for kind in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)
        assert browser.text("#place") == f"{place} of 3 letters read", key
    browser.click("#tape button:nth-child(3)")
    assert browser.text("#state") == str(dfa.run("abb")[3])
    browser.click("#word")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Home", code="Home")
    assert browser.text("#place") == "3 of 3 letters read", "in the text field Home moves the cursor"


def test_a_page_without_trained_models_says_so(tmp_path):
    page = write(tmp_path / "page.html", DFA.from_group("S3")).read_text()
    assert "Nothing was trained for this page" in page


def test_letter_buttons_and_witnesses_fill_in_words(browser, tmp_path):
    dfa = DFA.from_group("S3")
    browser.open(write(tmp_path / "page.html", dfa), "word=")
    assert "empty word" in browser.text("#tape")
    for letter in ("1", "0", "1"):
        browser.click(f"#letters button[data-letter='{letter}']")
    assert browser.evaluate("at('word').value") == "csc"
    assert browser.text("#state") == str(dfa.run("csc")[-1])
    browser.click("button.try")
    word = read_word(browser.evaluate("at('word').value"), dfa.alphabet)
    assert len(word) >= 6
    assert browser.text("#state") == str(dfa.run(word)[-1])


def test_vectors_and_eigenvalues_move_with_the_word(browser, tmp_path):
    """Counting modulo 6 by permutations: the one in h walks, and A has the six roots of unity."""
    browser.open(write(tmp_path / "page.html", DFA.from_group("Z6")), "word=%2B1%2B1%2B1")
    vector = "[...document.querySelectorAll('#h-0 i')].map((cell) => cell.textContent).join('')"
    opacity = "document.querySelector('#circle-0 .dot').style.opacity"
    browser.click("#step")
    browser.click("#step")
    assert (browser.evaluate(vector), browser.evaluate(opacity)) == ("001000", "1")
    places = browser.evaluate(
        "[...document.querySelectorAll('#circle-0 .dot')].map((d) => d.style.transform)"
    )
    assert len(set(places)) == 6


def test_before_the_first_step_the_page_shows_what_the_first_letter_will_do(browser, tmp_path):
    """S3, first letter s = (0 1): its matrix, the start vector, its eigenvalue -1; no result yet."""
    browser.open(write(tmp_path / "page.html", DFA.from_group("S3")), "word=sc")
    texts = "[...document.querySelectorAll('#{} i')].map((cell) => cell.textContent).join('')"
    shown = {name: browser.evaluate(texts.format(f"{name}-0")) for name in ("A", "old", "h")}
    assert shown == {"A": "010100001", "old": "100", "h": ""}
    dots = "[...document.querySelectorAll('#circle-0 .dot')]"
    places = browser.evaluate(f"{dots}.map((dot) => parseInt(dot.style.transform.slice(10)))")
    assert sorted(places) == [-46, 46, 46], "eigenvalues -1, 1, 1 on a circle of 46 px"
    assert browser.text("#doing-0").endswith("Next: the letter s permutes (0 1).")
    browser.click("#step")
    assert browser.evaluate(texts.format("h-0")) == "010"
    assert browser.text("#doing-0") == "The letter s permutes (0 1)."
    browser.open(write(tmp_path / "page.html", DFA.from_group("S3")), "word=")
    assert browser.evaluate(texts.format("h-0")) == "100"


def test_the_page_says_what_rings_arrows_and_the_letters_of_a_group_are(tmp_path):
    page = write(tmp_path / "page.html", DFA.from_group("S3")).read_text()
    for text in ("two rings: an accepting state", "arrow without a letter marks the start state"):
        assert text in page
    assert "<code>s</code> = (0 1), <code>c</code> = (0 1 2)" in page
    assert (
        "<code>b</code> = the identity"
        in write(tmp_path / "page.html", DFA.from_regex("(b|ab*a)*", "ab")).read_text()
    )
    assert 'id="meaning"' not in write(tmp_path / "page.html", machines.SECOND_TO_LAST_B).read_text()


def test_a_column_without_entries_is_left_out(tmp_path):
    """[ab]* has no word on which a class must fail; a group has."""
    assert "<th>witness</th>" in write(tmp_path / "page.html", DFA.from_group("S3")).read_text()
    assert (
        "witness"
        not in write(tmp_path / "page.html", DFA.from_regex("[ab]*", "ab"))
        .read_text()
        .split("<h2>Which model classes")[1]
        .split("<h2>Facts")[0]
    )


def test_a_long_word_and_a_wrong_letter_are_handled(browser, tmp_path):
    dfa = machines.SECOND_TO_LAST_B
    browser.open(write(tmp_path / "page.html", dfa))
    browser.type("#word", "ab" * 3000)
    assert "first 5000 letters" in browser.text("#problem")
    browser.click("#last")
    assert browser.text("#state") == str(dfa.run("ab" * 2500)[-1])
    browser.type("#word", "abxb")
    assert "position 2" in browser.text("#problem")
    browser.click("#last")
    assert browser.text("#place") == "2 of 2 letters read"


@pytest.mark.parametrize(
    "dfa", [DFA("", {}, 0, [0]), DFA.from_regex("[ab]*", "ab"), DFA.from_regex("a{12}", "a")]
)
def test_pages_of_edge_cases_load_without_errors(dfa, browser, tmp_path):
    browser.open(write(tmp_path / "page.html", dfa))
    browser.click("#last")
    assert browser.text("#state") == str(dfa.run(read_word(example_word(dfa), dfa.alphabet))[-1])
    assert browser.errors == []


def test_the_page_asks_for_nothing_from_elsewhere(browser, tmp_path):
    browser.open(write(tmp_path / "page.html", MACHINES["mixed"]))
    assert browser.evaluate("performance.getEntriesByType('resource').length") == 0


def test_pages_name_no_other_place_and_escape_what_they_are_given(tmp_path):
    page = write(
        tmp_path / "page.html", MACHINES["odd letters"], "</script><script>alert(1)</script>"
    ).read_text()
    assert "alert(1)" in page
    assert "<script>alert" not in page
    for mark in ("https://", "src=", "href=", "@import", "url(http"):
        assert mark not in page
    assert set(page.split("http://")[1:]) == {
        part for part in page.split("http://")[1:] if part.startswith("www.w3.org/2000/svg")
    }


@pytest.mark.parametrize("group", ["S200", "Z100"])
def test_a_machine_too_large_for_a_page_says_so(group, tmp_path, capsys):
    main(["explain", "--group", group, "--html", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "too large to run in a page" in page
    assert "Not drawn" in page
    assert len(page) < 100_000
