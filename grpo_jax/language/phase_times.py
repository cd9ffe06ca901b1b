"""Where the time of training goes: rollouts, rewards and updates, from the calls of the host in a train step."""

import time
from typing import Literal


class PhaseTimes:
    """Seconds of each phase. A train step is one program, but it asks the host for prompts first, then for rewards.

    Attributes:
      seconds: of `rollouts`, from the call for prompts to that for rewards, of `rewards`, their functions, and of
        `updates`, from then to the next call for prompts, or to `stop`.
    """

    def __init__(self):
        self._phase, self._since = None, 0.0
        self.seconds = dict.fromkeys(("rollouts", "rewards", "updates"), 0.0)

    def begin(self, phase: Literal["rollouts", "rewards", "updates"] | None) -> None:
        """Ends the phase before."""
        now = time.perf_counter()
        if self._phase is not None:
            self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def stop(self) -> None:
        """No phase begins until the next call of the host."""
        self.begin(None)

    def take(self) -> dict[str, float]:
        """The seconds since the last call of this."""
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return taken
