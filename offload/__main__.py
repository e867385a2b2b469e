"""``python -m offload``: the command line of :mod:`offload.cli.main`."""

import sys

from offload.cli.main import own_process

if __name__ == "__main__":
    sys.exit(own_process())
