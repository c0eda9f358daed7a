"""docs/porting.md: its code for other libraries runs here after a change of the import line, as it says.

The other blocks are run by tests/test_docs.py.
"""

import re
from pathlib import Path

import pytest

from statetrack import build
from statetrack.errors import UserError
from statetrack.peer_options import PEER_OPTIONS

PAGE = (Path(__file__).parents[2] / "docs/porting.md").read_text()
IMPORTS = {
    r"from fla\.ops\.\w+ import": "from statetrack.compat.fla import",
    r"from mamba_ssm\.ops\.[\w.]+ import": "from statetrack.compat.mamba_ssm import",
}
NOT_RUN = re.findall(r"<!-- not run -->\n```python\n(.*?)```", PAGE, flags=re.S)
BEFORE = [
    code for code in NOT_RUN if any(re.search(theirs, code) for theirs in IMPORTS)
]  # functions, no layers


@pytest.mark.parametrize("code", BEFORE, ids=["fla", "mamba-ssm"])
def test_code_for_another_library_runs_with_our_import(code):
    changed = code
    for theirs, ours in IMPORTS.items():
        changed = re.sub(theirs, ours, changed)
    assert changed != code
    names: dict = {}
    exec(compile(changed, "docs/porting.md", "exec"), names)
    results = [names[name] for name in ("o", "state", "out", "last_state") if name in names]
    assert len(results) == 2
    assert all(result.isfinite().all() for result in results)


def test_the_error_shown_is_the_error_raised():
    with pytest.raises(UserError) as raised:
        build("deltanet", vocab_size=100, allow_neg_eigval=True)
    assert str(raised.value) in PAGE


def test_the_table_of_options_is_the_one_that_errors_use():
    """Every option of another library in the table is recognised, or is called the same here."""
    table = PAGE.split("| fla | mamba-ssm | transformers | here |")[1].split("\n\n")[0]
    same = {"d_model", "head_dim", "GatedDeltaNet"}
    for row in table.splitlines()[2:]:
        theirs = {
            word
            for cell in row.split("|")[1:4]
            for code in re.findall(r"`(.*?)`", cell)
            for word in re.findall(r"\w+", code)
        }
        assert theirs - same <= PEER_OPTIONS.keys(), row
