"""A trained policy without this package: `grpo-jax export runs/mine --out exported`."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from grpo_jax import TrainedPolicy
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.commands.harness.trained import PolicyArguments
from grpo_jax.errors import ConfigError
from grpo_jax.evaluation.episodes import choose_actions
from grpo_jax.recording.files import new_files, write_arrays
from grpo_jax.recording.policy_saver import policy_arrays

PLATFORMS = ("cpu", "cuda", "tpu")
CARRY = "initial_carry"
USE = """Made with jax {jax} for {platforms}. With jax and flatbuffers, but without grpo_jax, for any number n of
observations, {shape}:

```python
import jax.export
import numpy as np

act = jax.export.deserialize(bytearray(open("act.jax_export", "rb").read()))
{begin}{returns} = act.call({greedy})
```

`act_sampled.jax_export` samples: `act.call({sampled})`, with a seed np.uint32.

"""
BEGIN = f"""arrays = np.load("policy.npz")
initial = [arrays[name] for name in arrays if name.startswith("{CARRY}/")]
carry = tuple(np.repeat(leaf, len(observation), axis=0) for leaf in initial)  # when episodes begin
"""
ARRAYS = """`policy.safetensors` and `policy.npz` contain the same arrays: parameters, hyperparameters and, where
observations are normalised, their statistics: networks see `(x - origin - mean) / sqrt(variance + 1e-8)`,
clipped to plus and minus 10. `policy.npz` has bfloat16 arrays as float32, as
NumPy has no bfloat16.
"""


@dataclasses.dataclass(kw_only=True)
class Arguments(PolicyArguments):
    """Writes one policy as safetensors, as NumPy arrays, and as a program that JAX alone can call."""

    out: Path
    """Folder for the files; it must not exist."""
    row: int | None = None
    """Row of the policy in the run, such as its seed's number; by default the best one."""


class Program(NamedTuple):
    """A function to export: actions, greedy or sampled."""

    name: str
    function: Callable
    arguments: dict[str, Any]  # shapes by name, with the symbolic number of observations "n"


def main(arguments: Arguments) -> None:
    if arguments.out.exists():
        raise ConfigError(f"--out {arguments.out} exists already; name a new folder")
    policy = arguments.load(arguments.row)
    programs = [] if policy.config.is_transformer else [make_program(policy, greedy) for greedy in (True, False)]
    exported = {}
    for program in programs:
        try:
            exporter = export.export(jax.jit(program.function), platforms=PLATFORMS)
            exported[program.name] = exporter(*program.arguments.values())
        except Exception as error:  # a custom network may have kernels for a single platform
            raise ConfigError(f"the policy cannot be exported as a program for {PLATFORMS}: {error}") from error
    with new_files(arguments.out) as out:
        save_arrays(policy, out)
        for name, artefact in exported.items():
            (out / f"{name}.jax_export").write_bytes(artefact.serialize())
        (out / "README.md").write_text(readme(policy, programs), encoding="utf-8")
    console = make_console()
    for path in sorted(arguments.out.iterdir()):
        console.print(f"{path.stat().st_size:>12,} bytes  {path}", soft_wrap=True)
    if not programs:
        console.print("A transformer is exported as weights only; see grpo_jax.generate.", soft_wrap=True)


def make_program(policy: TrainedPolicy, greedy: bool) -> Program:
    """The policy as a function of flat arguments: observation, then carry, action mask and seed where it has them."""
    env, num = policy.config.env, export.symbolic_shape("n")

    def batched(leaf):
        return jax.ShapeDtypeStruct((*num, *leaf.shape[1:]), leaf.dtype)

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*num, *leaf.shape), leaf.dtype), env.codec.given)
    arguments = {"observation": shapes}
    carry, structure = jax.tree.flatten(policy.initial_carry())
    if carry:
        arguments["carry"] = tuple(map(batched, carry))
    if env.action_mask is not None:
        arguments["action_mask"] = jax.ShapeDtypeStruct((*num, env.action_space.num_actions), jnp.bool_)
    if not greedy:
        arguments["seed"] = jax.ShapeDtypeStruct((), jnp.uint32)
    # The layout of the CPU's plan lowers for all platforms.
    config = dataclasses.replace(policy.config, execution_plan="cpu")
    choose = functools.partial(choose_actions, config, policy.params, policy.normalizer, policy.hyperparams)

    def act(*values):
        given = dict(zip(arguments, values, strict=True))
        key = None if greedy else jax.random.key(given["seed"], impl="threefry2x32")
        before = jax.tree.unflatten(structure, given.get("carry", ()))
        action, after = choose(given["observation"], before, key, given.get("action_mask"))
        return (action, tuple(jax.tree.leaves(after))) if carry else action

    return Program("act" if greedy else "act_sampled", act, arguments)


def save_arrays(policy: TrainedPolicy, out: Path) -> None:
    """Writes policy.safetensors and policy.npz, with the same names. NumPy has no bfloat16: there it is float32."""
    arrays = policy_arrays(policy)
    if not policy.config.is_transformer:  # also the carry for one observation
        arrays |= {f"{CARRY}/{i}": leaf for i, leaf in enumerate(jax.tree.leaves(policy.initial_carry()))}
    arrays = {path: np.ascontiguousarray(leaf) for path, leaf in arrays.items()}
    known = {path: leaf.astype(np.float32) if leaf.dtype.kind == "V" else leaf for path, leaf in arrays.items()}
    np.savez(out / "policy.npz", **known)
    write_arrays(out / "policy.safetensors", arrays, {})


def readme(policy: TrainedPolicy, programs: list[Program]) -> str:
    title = f"# The policy of row {int(policy.row)} of {policy.name}\n\n"
    if not programs:
        return title + ARRAYS
    greedy, sampled = (", ".join(program.arguments) for program in programs)
    observation, has_carry = programs[0].arguments["observation"], "carry" in programs[0].arguments
    shape = jax.tree.map(lambda leaf: f"{leaf.dtype} [n, {', '.join(map(str, leaf.shape[1:]))}]", observation)
    begin, returns = (BEGIN, "actions, carry") if has_carry else ("", "actions")
    values = {"shape": shape, "begin": begin, "returns": returns, "greedy": greedy, "sampled": sampled}
    return title + USE.format(**values, jax=jax.__version__, platforms=", ".join(PLATFORMS)) + ARRAYS


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))
