"""The package as a whole: what importing it costs, its metadata, and the links in its documents."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_loads_only_torch_and_numpy():
    """Compared with a bare `import torch, numpy`: our import may add our own modules and nothing else."""
    listing = "import sys; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    bare = set(run_python(f"import torch, numpy; {listing}").split())
    ours = set(run_python(f"import statetrack, statetrack.run; {listing}").split())
    added = {name for name in ours - bare if name not in sys.stdlib_module_names}
    assert added == {"statetrack"}


def test_a_missing_extra_is_named():
    code = "import sys; sys.modules['tyro'] = None\nfrom statetrack.cli import main\nmain(['demo'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2
    assert "needs tyro, which is not installed: pip install 'tyro>=1.0' 'rich>=13'" in result.stderr


def test_the_hint_for_an_extra_of_extras_lists_all_packages(monkeypatch):
    from importlib import metadata

    from statetrack.errors import _how_to_install

    assert _how_to_install("eval") == (
        "pip install 'transformers>=5' 'safetensors>=0.5' 'tokenizers>=0.22' 'lm-eval>=0.4.9' 'accelerate>=1'"
    )

    def not_installed(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", not_installed)
    assert "pip install -c constraints.txt '.[hf]'" in _how_to_install("hf")


def test_the_demo_without_its_extra_ends_before_it_trains(tmp_path):
    code = "import sys; sys.modules['matplotlib'] = None\nfrom statetrack.cli import main\n"
    code += f"main(['demo', '--quick', '--out', {str(tmp_path / 'demo')!r}])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2
    assert "drawing figures needs matplotlib" in result.stderr
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("module", ["run", "reproduce"])
def test_modules_that_train_set_how_threads_wait_before_torch_is_loaded(module):
    """torch, while it is loaded, finds the variable set: a stand-in for it prints that and ends."""
    code = (
        "import importlib.abc, os, runpy, sys\n"
        "class Seen(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch': print(os.environ.get('GOMP_SPINCOUNT')); os._exit(0)\n"
        "sys.meta_path.insert(0, Seen())\n"
        f"runpy.run_module('statetrack.{module}', run_name='__main__')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    result = subprocess.run(
        [sys.executable, "-Xutf8", "-c", code], capture_output=True, text=True, env=environment
    )
    assert result.stdout.strip() == "1000"


def test_links_in_the_documents_lead_somewhere():
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_direct_dependency_is_pinned():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    names = {re.split(r"[\[><=;! ]", name)[0] for name in wanted} - {"statetrack"}
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.M))
    assert names <= pinned


def test_the_version_has_one_source():
    """`statetrack.__version__`; pyproject.toml reads it, and CITATION.cff repeats it."""
    import tomllib

    import statetrack

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "statetrack.__version__"}
    (cited,) = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), flags=re.M)
    assert cited == statetrack.__version__


def test_type_hints_are_published():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert (ROOT / "src/statetrack/py.typed").exists()
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["statetrack"]
