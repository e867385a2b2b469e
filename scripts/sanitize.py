"""Run the tests of csrc/aio and swap/ on an extension built with sanitizers. Called by `make sanitize`.

Owns: the build folders build/sanitize-*, the environment that a sanitizer needs inside an uninstrumented Python, and
the reasons for which a sanitizer is left out. Must not know: what the tests do.

    python scripts/sanitize.py [address] [thread] [-- arguments of pytest]

`address` is AddressSanitizer with UndefinedBehaviorSanitizer. The installed extension stays as it is: a finder in a
sitecustomize.py beside the build puts the instrumented one in its place, in child processes, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
# What libtsan does not see: that ended threads have ended, when the C library frees what they had; and that the memory
# of a ring which was only tried is another one's, for liburing asks the kernel itself.
SUPPRESSIONS: Final = "race:_dl_deallocate_tls\nrace:require_operations\n"
TESTS: Final = ("aio", "checksums", "store", "commit", "space", "extents", "durable", "faults")


@dataclass(frozen=True, slots=True)
class Sanitizer:
    """How one build is made and run.

    Attributes:
        name: of the CMake setting OFFLOAD_SANITIZE.
        flag: of the compiler.
        library: that must be loaded before Python itself.
        variable: that holds its options.
        options: reports end the process with an error, which a test then sees.
        suppressions: reports that are false, as it reads them; none if empty.
        left_out: tests that it cannot run, with the reason.
    """

    name: str
    flag: str
    library: str
    variable: str
    options: str
    left_out: Mapping[str, str] = field(default_factory=dict)
    suppressions: str = ""


SANITIZERS: Final = {
    "address": Sanitizer(
        "address",
        "-fsanitize=address,undefined",
        "libasan.so",
        "ASAN_OPTIONS",
        # Python itself frees nothing at its end. Memory limits of the tests do not hold for shadow memory.
        "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
    ),
    "thread": Sanitizer(
        "thread",
        "-fsanitize=thread",
        "libtsan.so",
        "TSAN_OPTIONS",
        # The tests fork while threads run; the child only closes descriptors and opens an engine of its own.
        "die_after_fork=0:halt_on_error=1:abort_on_error=1:report_signal_unsafe=0",
        {
            "tests/test_aio.py::test_forked_child_gets_a_clear_error_and_does_not_hang": (
                "opens an engine in a forked child, but libtsan starts no threads there"
            )
        },
        SUPPRESSIONS,
    ),
}


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _preload(sanitizer: Sanitizer) -> str:
    """Return the libraries to load before Python; the C++ one so that exceptions are seen."""
    paths = []
    for name in (sanitizer.library, "libstdc++.so"):
        asked = subprocess.run([_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        paths.append(str(Path(asked.stdout.strip()).resolve()))
    return " ".join(paths)


def _without_random_addresses() -> list[str]:
    """ThreadSanitizer of older compilers cannot live with as much address randomisation as newer kernels use."""
    return ["setarch", "-R"] if shutil.which("setarch") else []


def missing_for(sanitizer: Sanitizer) -> str | None:
    """Return why a sanitizer cannot be used here, or None when it can."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "probe.cc"
        source.write_text("int main() { return 0; }\n")
        build = subprocess.run(
            [_compiler(), sanitizer.flag, str(source), "-o", f"{directory}/probe"],
            capture_output=True,
            text=True,
            check=False,
        )
        if build.returncode:
            return f"{_compiler()} cannot link with {sanitizer.flag}: {build.stderr.strip().splitlines()[-1]}"
    preload = _preload(sanitizer)
    if not Path(preload.split()[0]).is_absolute():
        return f"{_compiler()} has no shared {sanitizer.library}"
    environment = {**os.environ, "LD_PRELOAD": preload, sanitizer.variable: sanitizer.options}
    command = [*_without_random_addresses(), sys.executable, "-c", "print(1)"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        return f"Python does not start with {sanitizer.library}: {(run.stderr.strip() or '?').splitlines()[0]}"
    return None


def build(sanitizer: Sanitizer) -> Path:
    """Build the instrumented extension; return the folder with the finder that puts it in place."""
    folder = ROOT / "build" / f"sanitize-{sanitizer.name}"
    import pybind11

    root = ROOT / "build" / "liburing"
    configure = [
        "cmake",
        "-S",
        str(ROOT),
        "-B",
        str(folder),
        "-G",
        "Ninja",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        f"-DOFFLOAD_SANITIZE={sanitizer.name}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DOFFLOAD_LIBURING_ROOT={root if root.is_dir() else ''}",
    ]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in (configure, ["cmake", "--build", str(folder), "--target", "_aio"]):
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    (extension,) = (folder / "csrc" / "aio").glob("_aio.*.so")
    place = folder / "python"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name == 'swap._aio': return importlib.util.spec_from_file_location(name, {str(extension)!r})\n"
        "sys.meta_path.insert(0, Finder)\n"
    )
    return place


def run_tests(sanitizer: Sanitizer, place: Path, arguments: list[str]) -> int:
    """Run the tests on the extension behind `place`; return pytest's exit status."""
    (place / "suppressions").write_text(sanitizer.suppressions)
    known = f":suppressions={place / 'suppressions'}" if sanitizer.suppressions else ""
    environment = {
        **os.environ,
        "LD_PRELOAD": _preload(sanitizer),
        sanitizer.variable: sanitizer.options + known,
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(place),
        "OFFLOAD_SANITIZED": sanitizer.name,
    }
    selection = [f"tests/test_{name}.py" for name in TESTS]
    for test, reason in sanitizer.left_out.items():
        print(f"== {sanitizer.name}: left out: {test}: {reason}", flush=True)
        selection += ["--deselect", test]
    command = [*_without_random_addresses(), sys.executable, "-m", "pytest", "-q", *selection, *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


def main(arguments: list[str]) -> int:
    """Run the sanitizers that were asked for, all by default; return the first exit status that is not 0."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    names, rest = arguments[:at] or list(SANITIZERS), arguments[at + 1 :]
    status = 0
    for name in names:
        sanitizer = SANITIZERS[name]
        if missing := missing_for(sanitizer):
            print(f"== {name}: skipped: {missing}")
            continue
        print(f"== {name}: building", flush=True)
        place = build(sanitizer)
        status = run_tests(sanitizer, place, rest) or status
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
