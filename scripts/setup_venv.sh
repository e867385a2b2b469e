#!/bin/sh
# Creates the virtual environment and builds the extensions into it. Called by `make venv`; needs no root.
#
#   scripts/setup_venv.sh PYTHON VENV
#
# liburing: the system's where its header is found, else unpacked beside the build where apt can fetch it, else none:
# then the thread engine is built and this says so. OFFLOAD_IGNORE_SYSTEM_LIBURING=1 skips the first choice,
# OFFLOAD_NO_LIBURING=1 skips both.
set -eu
python=$1
venv=$2
say() { printf '== %s\n' "$*"; }

"$python" - <<'PY' || exit 1
import sys
if sys.version_info < (3, 10):
    sys.exit(f"offload needs Python 3.10 or later, but this is {sys.version.split()[0]}; use make PYTHON=python3.11")
PY
if ! "${CXX:-c++}" --version >/dev/null 2>&1; then
    echo "no C++ compiler: install g++ (Debian: apt-get install g++ make) or set CXX" >&2
    exit 1
fi

# Otherwise the build would take the compiler that this Python was built with, which need not be here.
export CXX="${CXX:-c++}"
if command -v cc >/dev/null 2>&1; then export CC="${CC:-cc}"; fi

if [ ! -x "$venv/bin/python" ]; then
    say "creating $venv"
    "$python" -m venv "$venv" || {
        echo "could not create $venv: the venv module is missing (Debian: apt-get install python3-venv)" >&2
        exit 1
    }
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
log=build/setup.log
mkdir -p build
: >"$log"
pip() {
    "$venv/bin/python" -m pip "$@" >>"$log" 2>&1 || {
        tail -n 60 "$log" >&2
        echo "set-up failed; the whole log is in $log" >&2
        exit 1
    }
}

say "installing the packages pinned in constraints.txt"
# The build tools first: the extension is then built without a second, isolated download of them.
pip install --constraint constraints.txt scikit-build-core pybind11 cmake ninja

root=""
io_uring=ON
if [ -n "${OFFLOAD_NO_LIBURING:-}" ]; then
    io_uring=OFF
    say "liburing: left out as asked (OFFLOAD_NO_LIBURING): the thread engine is built"
elif [ -z "${OFFLOAD_IGNORE_SYSTEM_LIBURING:-}" ] &&
    printf '#include <liburing.h>\nint main() { return io_uring_queue_init == nullptr; }\n' |
    "${CXX:-c++}" -x c++ - -o /dev/null -luring 2>/dev/null; then
    say "liburing: the system's"
else
    if [ -d build/liburing ] || "$python" scripts/fetch_deb.py build/liburing liburing-dev liburing2; then
        root=$PWD/build/liburing
        say "liburing: unpacked in build/liburing"
    else
        io_uring=OFF
        say "liburing: not in the system and not fetchable with apt: the thread engine is built (as fast, at more CPU time)"
    fi
fi

say "building the extensions"
pip install --no-build-isolation --constraint constraints.txt \
    --config-settings=cmake.define.OFFLOAD_LIBURING_ROOT="$root" \
    --config-settings=cmake.define.OFFLOAD_WITH_IO_URING="$io_uring" \
    --editable '.[hf,finetune,test,docs,dev]'

# NVRTC alone, which needs no GPU: a test compiles the kernels with it. A torch of CUDA has brought its own, in a version
# of its own: so this one is no constraint.
if ! "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
    "$venv/bin/python" -m pip install --no-deps nvidia-cuda-nvrtc==13.5.37 >>"$log" 2>&1 ||
        say "NVRTC: not fetchable: the test that compiles kernels for GPUs is skipped"
fi

"$venv/bin/python" - <<'PY'
import importlib
for name in ("swap._aio", "offload._cpu_adam"):
    importlib.import_module(name)
from swap import engines_available
print("== ready: I/O engines", ", ".join(engines_available()))
PY
