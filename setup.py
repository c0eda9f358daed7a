"""Build the native CPU kernels where there is a C++17 compiler; without one the package installs as well.

The result is a plain shared library, called through ctypes: it knows no version of Python or PyTorch.
Everything else about the package is in pyproject.toml.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/statetrack/ops/native")
REASON = "not_built.txt"  # beside the library: why it is not there
FLAGS = ["-O3", "-std=gnu++17", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi"]
# The kernels are compiled for each of these; the library picks one when it is loaded.
SETS: dict[str, list[str]] = {"portable": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    SETS["avx2"] = ["-mavx2", "-mfma"]
    SETS["avx512"] = ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma"]
    SETS["avx512"] += ["-mprefer-vector-width=512"]


def find_compiler() -> list[str]:
    """The compiler in the environment variable CXX, or the first of the usual names."""
    if given := shlex.split(os.environ.get("CXX", "")):
        return given
    found = next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if found is None:
        raise OSError("no C++17 compiler at install")
    return [found]


def call(*command: str) -> None:
    """Run a compiler; its first error becomes the reason."""
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.splitlines() or ["no message"]
        error = next((line for line in lines if "error" in line), lines[-1])
        raise OSError(f"{Path(command[0]).name} failed at install: {error.strip()}")


def build(library: Path, scratch: Path) -> None:
    """Compile the kernels once per instruction set, the rest once, and link; OSError if anything fails."""
    compiler = find_compiler()
    has_avx = ["-DHAS_AVX"] if "avx2" in SETS else []
    jobs = [(SOURCES / "library.cpp", has_avx, scratch / "library.o")]
    for name, flags in SETS.items():
        jobs.append((SOURCES / "kernels.cpp", [*flags, f"-DSET={name}"], scratch / f"{name}.o"))
    scratch.mkdir(parents=True, exist_ok=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(
            pool.map(lambda job: call(*compiler, *FLAGS, *job[1], "-c", str(job[0]), "-o", str(job[2])), jobs)
        )
    fresh = library.with_suffix(".new")
    dl = ["-ldl"] if sys.platform == "linux" else []
    call(*compiler, "-shared", "-s", "-o", str(fresh), *(str(job[2]) for job in jobs), "-pthread", *dl)
    # renamed, not overwritten: a running process may have the old one mapped
    fresh.replace(library)


class BuildNative(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"  # no tag of a Python version

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        reason = library.with_name(REASON)
        for old in (library, reason):
            old.unlink(missing_ok=True)
        try:
            build(library, Path(self.build_temp) / "native")
        except OSError as error:
            reason.parent.mkdir(parents=True, exist_ok=True)
            reason.write_text(f"{error}\n")
            print(f"statetrack: the native CPU backend was not built ({error}).", file=sys.stderr)

    def copy_extensions_to_source(self) -> None:
        """For editable installs: the library, or the reason, goes beside the sources."""
        for name in (Path(self.get_ext_filename("libstatetrack")).name, REASON):
            (SOURCES / name).unlink(missing_ok=True)
        super().copy_extensions_to_source()
        reason = Path(self.build_lib) / "statetrack/ops/native" / REASON
        if reason.exists():
            shutil.copy(reason, SOURCES)


class AnyPython(bdist_wheel):
    """One wheel per platform serves every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "statetrack.ops.native.libstatetrack",
            sources=[str(SOURCES / name) for name in ("library.cpp", "kernels.cpp")],
            depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPython},
)
