"""What does this drive give, beside others? ``python bench/nvme PATH``; results go to build/bench."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # beside this file is a deepspeed.py
    from nvme.command import main

    sys.exit(main())
