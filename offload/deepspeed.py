"""Another name of :mod:`offload.integrations.deepspeed`: in imports, ``deepspeed`` becomes ``offload.deepspeed``."""

import sys

from offload.integrations import deepspeed
from offload.integrations.deepspeed import *  # noqa: F403 - for who reads types

_BELOW = f"{deepspeed.__name__}."
sys.modules[__name__] = deepspeed
for _name in [name for name in sys.modules if name.startswith(_BELOW)]:  # each module once, under both names
    sys.modules[f"{__name__}.{_name.removeprefix(_BELOW)}"] = sys.modules[_name]
