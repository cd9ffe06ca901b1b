"""Steps of gymnax's environments written for vectors: the same bits from the same keys, in fewer kernels.

gymnax moves the entities of a game one after the other, with a scatter each, and looks for a free place in a loop whose
length depends on the state. On a GPU each scatter is a launch of its own, and such a loop waits for the host. Here all
entities are compared at once: comparisons and sums in place of scatters (two are left, in Seaquest), ranks in place of
sorts, no loop. `tests/environments/test_lean.py` plays both side by side, and counts these operations.

Actions are those of the space: others, which gymnax clamps or wraps, may have other effects.

`Config("Asterix-MinAtar")` takes the lean step; gymnax's own is `Config(gymnax.make("Asterix-MinAtar")[0])`.
"""

import importlib
from typing import Any

LEAN = {
    "Asterix-MinAtar": "asterix",
    "Breakout-MinAtar": "breakout",
    "Catch-bsuite": "catch",
    "Freeway-MinAtar": "freeway",
    "Pong-misc": "pong",
    "Seaquest-MinAtar": "seaquest",
    "SpaceInvaders-MinAtar": "space_invaders",
}
"""The module here that has the class `Lean` for a name of gymnax."""


def lean_or_same(env: Any, name: str) -> Any:
    """The environment with a lean step if there is one for the name, else the environment itself."""
    if name not in LEAN:
        return env
    return importlib.import_module(f"{__name__}.{LEAN[name]}").Lean()
