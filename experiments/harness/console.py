"""What experiments print on."""

import sys

from rich.console import Console


def make_console(*, width: int = 120, quiet: bool = False) -> Console:
    """Takes all text as it is, also brackets and colons in paths and names; `width` is that of files and pipes.

    Lines with a path in them are printed with `soft_wrap`, so that it can be copied.
    """
    return Console(
        width=None if sys.stdout.isatty() else width, quiet=quiet, markup=False, emoji=False, highlight=False
    )
