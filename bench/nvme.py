"""What does this drive give? The same as ``python -m offload bench nvme``, with results in build/bench by default."""

from __future__ import annotations

import sys
from pathlib import Path

from offload.cli.main import main

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    sys.exit(main(["bench", "nvme", "--output", str(ROOT / "build" / "bench"), *sys.argv[1:]]))
