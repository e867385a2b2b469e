"""``python -m offload``: the command line of :mod:`offload.cli`."""

import sys

from offload.cli import main

if __name__ == "__main__":
    sys.exit(main())
