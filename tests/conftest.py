"""Settings every test shares."""

import os

import hypothesis
import pytest
import torch

# Without a GPU, Triton kernels run in its interpreter; this must be set before they are imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Two test workers on two cores: one thread each, or they fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# The same examples in every run: a red test can be repeated.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture
def own_tables(monkeypatch):
    """What a test registers and loads is gone after it; what other tests have loaded is not there."""
    from statetrack import config, layers, plugins, tasks

    monkeypatch.setenv(plugins.VARIABLE, "")
    tables = tasks.TASKS, layers.PRESETS, config._KINDS, plugins._loaded
    before = [table.copy() for table in tables]
    plugins._loaded.clear()
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Headless Chromium; tests that ask for it are skipped where there is none."""
    from browser import CHROMIUM, Browser

    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
