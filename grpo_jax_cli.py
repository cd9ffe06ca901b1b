"""The command `grpo-jax`. It stands beside the package, so that help comes without the seconds of importing JAX."""

import difflib
import importlib.metadata
import os
import runpy
import sys

COMMANDS = {
    "first steps": {
        "train": "Any algorithm on any environment",
        "sweep": "Grids and random samples of settings",
        "plot": "Runs side by side, from their folders",
        "list": "The names that flags take",
        "docs": "Pages of the documentation, also without a clone",
    },
    "trained policies": {
        "evaluate": "Episodes of the trained policies in a folder",
        "play": "Draws episodes of a trained policy",
        "export": "A trained policy without this package",
    },
    "language models": {
        "lm": "GRPO on a language model: prompts from a file, rewards in Python",
        "ask": "Answers of a language model to prompts",
    },
}
"""The modules of `grpo_jax.commands` and the first words of their docstrings, in groups."""


def main() -> None:
    """`grpo-jax NAME FLAGS` is `python -m grpo_jax.commands.NAME FLAGS`."""
    name, *flags = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print_help()
    elif name == "--version":
        print(f"grpo-jax {importlib.metadata.version('grpo-jax')}")
    else:
        known = [command for group in COMMANDS.values() for command in group]
        command = name.replace("_", "-")
        if command not in known:
            close = difflib.get_close_matches(command, known)
            advice = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
            print(f"error: unknown command {name!r}: {advice}", file=sys.stderr)
            sys.exit(2)
        sys.argv[1:] = flags
        # As `python -m` does, for custom modules such as my_networks:network. But commands may be given in a
        # downloaded folder, and a module in it must not stand in for a package that is not installed.
        names_own = {flag.partition("=")[0] for flag in flags} & {"--trust", "--environment"}
        if command not in {*COMMANDS["trained policies"], "ask"} or names_own:
            sys.path.append(os.getcwd())
        try:
            runpy.run_module(f"grpo_jax.commands.{command.replace('-', '_')}", run_name="__main__", alter_sys=True)
        except KeyboardInterrupt:  # while it is imported
            print("interrupted", file=sys.stderr)
            sys.exit(130)


def print_help() -> None:
    """Prints all commands, in the style of their own help."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    console = Console(highlight=False)
    options = {"-h, --help": "show this help message and exit", "--version": "show the version and exit"}
    console.print("usage: grpo-jax COMMAND [OPTIONS]\n\nGRPO and PPO in JAX.\n", markup=False)
    for title, rows in {"options": options, **COMMANDS}.items():
        grid = Table.grid(padding=(0, 2))
        grid.add_column(min_width=18, no_wrap=True)
        for name, line in rows.items():
            grid.add_row(name, line)
        console.print(Panel(grid, title=title, title_align="left", border_style="dim"))
    console.print("The options of a command: grpo-jax COMMAND --help")


if __name__ == "__main__":
    main()
