"""The command `grpo-jax`: it lists every command at once, and starts one as a module."""

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_jax_cli

FOLDER = Path(grpo_jax_cli.__file__).parent / "grpo_jax" / "commands"
GROUPS = grpo_jax_cli.COMMANDS.values()
COMMANDS = {name.replace("-", "_"): line for group in GROUPS for name, line in group.items()}


def test_help_lists_every_command():
    assert COMMANDS.keys() == {path.stem for path in FOLDER.glob("[!_]*.py")}, "complete grpo_jax_cli.COMMANDS"
    for name, line in COMMANDS.items():
        source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        assert ast.get_docstring(ast.parse(source)).startswith(line), name


def test_help_and_version_do_not_wait_for_jax():
    script = "import sys, grpo_jax_cli; grpo_jax_cli.main(); assert not {'jax', 'grpo_jax'} & sys.modules.keys()"
    for flag in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", script, flag], cwd=FOLDER, capture_output=True)
        assert done.returncode == 0, done.stderr


def test_a_command_finds_modules_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "argv", ["grpo-jax", "train", "--seed", "1"])
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: started.append((name, sys.argv[1:], sys.path)))
    started = []
    grpo_jax_cli.main()
    assert started == [("grpo_jax.commands.train", ["--seed", "1"], [str(tmp_path)])]


LOOKS = {
    **{"play .": False, "evaluate . --num-episodes 3": False, "export . --out x": False, "ask . hi": False},
    **{"play . --env-params gravity=5": False, "play . --trust": True},
    **{"evaluate . --environment mine:Env": True, "train --network mine:network": True},
}


@pytest.mark.parametrize("line, looks", LOOKS.items())
def test_modules_of_a_downloaded_folder_are_not_found(line, looks, tmp_path, monkeypatch):
    """One named as a package that is not installed would otherwise be imported in its place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "argv", ["grpo-jax", *line.split()])
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: None)
    grpo_jax_cli.main()
    assert (str(tmp_path) in sys.path) == looks


@pytest.mark.parametrize("name, advice", [("trian", "did you mean train?"), ("xyz", "known: train, sweep, ")])
def test_an_unknown_command_is_one_line(name, advice, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grpo-jax", name])
    with pytest.raises(SystemExit) as stopped:
        grpo_jax_cli.main()
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and printed.startswith(f"error: unknown command {name!r}: {advice}")
