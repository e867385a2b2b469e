"""Another name of :mod:`offload.integrations.deepspeed`: in imports, ``deepspeed`` becomes ``offload.deepspeed``."""

import sys

from offload.integrations import deepspeed
from offload.integrations.deepspeed import *  # noqa: F403 - for who reads types

sys.modules[__name__] = deepspeed
