"""A trained policy without this package: `grpo-jax export runs/mine --out exported`."""

import dataclasses
import functools
import shutil
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
from grpo_jax.config import Config
from grpo_jax.environments.spaces import Box
from grpo_jax.errors import ConfigError
from grpo_jax.evaluation.episodes import choose_actions
from grpo_jax.policies.networks import MLP
from grpo_jax.recording.config_file import config_fields
from grpo_jax.recording.files import new_files, write_arrays, write_json
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
ARRAYS = """`policy.py`, if the network is an MLP, acts with NumPy alone: `from policy import act`, then `act(x{mask})`
for one observation x, as the environment gives it, or a batch; `act(x, np.random.default_rng(0){mask})` samples.

`manifest.json` names the network, its activation and sizes. `policy.safetensors` and `policy.npz` contain the same
arrays: parameters, hyperparameters and, where observations are normalised, their statistics: networks see
`(x - origin - mean) / sqrt(variance + 1e-8)`, clipped to plus and minus 10. `policy.npz` has bfloat16 as float32.
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
        save_numpy(policy, out)
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
        action, after = choose(given["observation"], before, key=key, action_mask=given.get("action_mask"))
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


def save_numpy(policy: TrainedPolicy, out: Path) -> None:
    """Writes manifest.json and, for an MLP with its usual actions, policy.py, which reads what the manifest says."""
    config, env, network = policy.config, policy.config.env, policy.config.network
    manifest = {"policy": policy.name, "row": policy.row, "network": config_fields(config)[0].get("network")}
    is_mlp = type(network) is MLP and network.recurrent == "none" and config.action_distribution == "auto"
    if is_mlp:
        seen, parts = network.actor_observation, jax.tree_util.tree_leaves_with_path(env.codec.leaves)
        paths = [[jax.tree_util.keystr((key,), simple=True) for key in path] for path, _ in parts]
        names = "shape", "num_values", "start"
        manifest["observation"] = {
            "/".join(keys): {"keys": keys} | {name: getattr(leaf, name) for name in names}
            for keys, (_, leaf) in zip(paths, parts, strict=True)
            if seen is None or keys[0] in seen
        }
        manifest |= {"actions": described_actions(config), "has_action_masks": env.action_mask is not None}
        shutil.copy(Path(__file__).parent / "harness" / "exported_policy.py", out / "policy.py")
    write_json(out / "manifest.json", manifest)


def described_actions(config: Config) -> dict[str, Any]:
    """How policy.py makes an action of the network's outputs."""
    space, to_environment = config.env.action_space, config.policy.distribution.to_environment
    zeros = np.zeros(np.shape(space[0]), np.float32 if isinstance(space, Box) else np.int32)
    first = np.asarray(config.env.codec.decode(zeros))
    described = {"first": first, "dtype": first.dtype.name}
    if not isinstance(space, Box):
        return described | {"num_actions": np.ravel(space.num_actions)}
    middle, above, below = (np.asarray(to_environment(zeros + x)) for x in (0, 1, -1))
    scale = np.maximum(above - middle, middle - below)  # a bound may cut one of them
    return described | {"middle": middle, "scale": scale, "low": space.low, "high": space.high}


def readme(policy: TrainedPolicy, programs: list[Program]) -> str:
    title = f"# The policy of row {int(policy.row)} of {policy.name}\n\n"
    if not programs:
        return title + ARRAYS.format(mask="")
    greedy, sampled = (", ".join(program.arguments) for program in programs)
    observation, has_carry = programs[0].arguments["observation"], "carry" in programs[0].arguments
    shape = jax.tree.map(lambda leaf: f"{leaf.dtype} [{', '.join(map(str, leaf.shape))}]", observation)
    begin, returns = (BEGIN, "actions, carry") if has_carry else ("", "actions")
    mask = ", action_mask=mask" if "action_mask" in programs[0].arguments else ""
    values = {"shape": shape, "begin": begin, "returns": returns, "greedy": greedy, "sampled": sampled}
    return title + (USE + ARRAYS).format(**values, mask=mask, jax=jax.__version__, platforms=", ".join(PLATFORMS))


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))
