"""Tests of a changed repository, in children forked from a process that has torch imported already.

`python tools/forked_tests.py torch ...` is that process: a line of JSON in is a child that runs pytest, a
line out its number, the next one that it has ended. The package itself is imported by the child, so it is the
changed one.
"""

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Recording:
    """Per test: seconds, and the functions it calls as "file:first line". Set-up counts for a whole file.

    "file:0" stands for what runs when a file is imported: it counts as called by whoever calls into the file.
    """

    seconds: dict[str, float]
    calls: dict[str, list[str]]

    def ordered(self, function: str) -> tuple[list[str], list[str]]:
        """Tests that call a function, and the others; fast files first, the tests of a file together."""
        called = {name for name, functions in self.calls.items() if function in functions}
        callers = {t for t in self.seconds if t in called or _file(t) in called}
        return self._by_file(callers), self._by_file(self.seconds.keys() - callers)

    def _by_file(self, tests: set[str]) -> list[str]:
        files: dict[str, float] = {}
        for test in tests:
            files[_file(test)] = files.get(_file(test), 0.0) + self.seconds[test]
        return sorted(tests, key=lambda t: (files[_file(t)], _file(t), self.seconds[t], t))


def _file(test: str) -> str:
    return test.partition("::")[0]


class Tree:
    """A copy of the repository, in which one process at a time runs tests."""

    def __init__(self, root: Path, folder: Path, imports: Sequence[str]):
        self.folder, self.imports, self.child = folder, imports, 0
        for name in ("src", "tests"):
            shutil.copytree(root / name, folder / name, symlinks=True)
        for path in root.iterdir():
            if not path.name.startswith(".") and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)

    def pytest(
        self, plugin: dict[str, Any], tests: list[str], seconds: float, write_cache: bool = False
    ) -> Any:
        """Run tests in a child process; "timeout" if it takes longer than `seconds`."""
        answer = self.folder / ".answer.json"
        answer.unlink(missing_ok=True)
        task = {"plugin": plugin, "tests": tests, "answer": str(answer), "write_cache": write_cache}
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(task).encode() + b"\n")
        self.child = int(self.server.stdout.readline())
        in_time, *_ = select.select([self.server.stdout], [], [], seconds)
        self.stop()
        self.server.stdout.readline()  # it has ended
        if not in_time:
            return "timeout"
        return (
            json.loads(answer.read_text()) if answer.exists() else {"code": 2, "failed": "the process died"}
        )

    def stop(self) -> None:
        """End the tests that are running, with all processes they started."""
        with contextlib.suppress(ProcessLookupError):
            if self.child:
                os.killpg(self.child, signal.SIGKILL)
        self.child = 0

    def __enter__(self) -> "Tree":
        environment = os.environ | {"PYTHONPATH": str(self.folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
        command = [sys.executable, __file__, *self.imports]
        self.server = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self.folder,
            env=environment,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self.server.communicate()

    @contextlib.contextmanager
    def changed(self, file: str, source: str) -> Iterator[None]:
        """The tree with another text in one file; bytecode of the old one must not be found."""
        path = self.folder / file
        before = path.read_text()
        for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            cached.unlink()
        path.write_text(source)
        try:
            yield
        finally:
            path.write_text(before)


def serve(imports: Sequence[str]) -> None:
    """Fork a child for every task that comes in, one at a time."""
    for name in imports:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.setsid()
            _child(json.loads(line))
            os._exit(0)
        print(child, file=replies, flush=True)
        print(os.waitpid(child, 0)[1], file=replies, flush=True)


def _child(task: dict[str, Any]) -> None:
    import pytest

    silence = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(silence, number)
    sys.dont_write_bytecode = not task["write_cache"]
    plugin = Plugin(Path.cwd(), **task["plugin"])
    files = list(dict.fromkeys(map(_file, task["tests"])))
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow and not gpu"]
    try:
        code = pytest.main([*options, *files], plugins=[plugin])
        answer = plugin.answer(int(code))
    except BaseException as error:  # a mutant may break anything
        answer = {"code": 2, "failed": repr(error)}
    partial = Path(task["answer"] + ".partial")
    partial.write_text(json.dumps(answer))
    partial.rename(task["answer"])


class Plugin:
    """Chooses and orders the tests; with `record` notes what they call; knows the first that failed."""

    def __init__(self, root: Path, record: bool = False, order: list[str] | None = None):
        self.root, self.record, self.order = f"{root}/", record, order
        self.failed, self.now = "", ""
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, set[str]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.order is not None:
            place = {test: i for i, test in enumerate(self.order)}
            items[:] = sorted((i for i in items if i.nodeid in place), key=lambda i: place[i.nodeid])

    def _trace(self, frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(self.root + "src/"):
            file = code.co_filename.removeprefix(self.root)
            self.calls[self.now] |= {f"{file}:{code.co_firstlineno}", f"{file}:0"}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._enter(_file(nodeid))  # fixtures may be shared by the tests of a file

    def pytest_runtest_call(self, item: Any) -> None:
        self._enter(item.nodeid)

    def _enter(self, name: str) -> None:
        self.now = name
        self.calls.setdefault(name, set())
        if self.record:
            sys.settrace(self._trace)

    def pytest_runtest_logreport(self, report: Any) -> None:
        sys.settrace(None)
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def answer(self, code: int) -> dict[str, Any]:
        calls = {name: sorted(found) for name, found in self.calls.items()} if self.record else {}
        return {"code": code, "failed": self.failed, "seconds": self.seconds, "calls": calls}


def record(tree: Tree, tests: list[str]) -> Recording:
    """Run the tests unchanged; they must pass."""
    found = tree.pytest({"record": True}, tests, 1800, write_cache=True)
    if found == "timeout" or found["code"] != 0:
        why = found if isinstance(found, str) else found["failed"]
        raise SystemExit(f"The tests do not pass on the unchanged source: {why}")
    return Recording({test: found["seconds"][test] for test in found["seconds"]}, found["calls"])


if __name__ == "__main__":
    serve(sys.argv[1:])
