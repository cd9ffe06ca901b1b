"""The console of the commands."""

from rich.table import Table

from grpo_jax.commands.harness.command import make_console


def test_a_narrow_console_leaves_out_the_last_columns(capsys):
    table = Table("run", "final return", "steps/s", "compile", caption="a note")
    table.add_row("ppo", "138.8 [119.3, 158.4]", "44,374", "74 s")
    make_console(width=45).print(table)
    printed = capsys.readouterr().out
    assert "138.8 [119.3, 158.4]" in printed and "44,374" in printed and "74 s" not in printed
    assert "too narrow for: compile" in printed and "a note" in printed and "…" not in printed
