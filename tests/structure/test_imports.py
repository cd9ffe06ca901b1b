"""The order of the folders, held by the imports themselves."""

import ast
import functools
from pathlib import Path

import grpo_jax

PACKAGE = Path(grpo_jax.__file__).parent
REPOSITORY = PACKAGE.parent

# From the top: a folder, or a module of the package itself, imports only from what stands below it.
ORDER = (
    *("commands", "language", "sweeps", "recording", "rendering", "runs", "training", "evaluation", "rollouts"),
    *("updates", "config"),
    *("config_checks", "algorithms", "baselines", "policies", "kernels", "objectives", "environments"),
    *("devices", "groups", "host_calls", "observations", "precision", "types"),
    *("hyperparams", "importing", "errors"),
)
# Which do not know each other.
STRANGERS = ({"kernels", "objectives", "environments", "devices"}, {"rollouts", "updates"})
HOST = {"commands", "sweeps", "recording", "language", "rendering", "runs"}
# Where other packages keep their environments, and how errors of rewards and simulators are told.
AT_THE_DOOR = {
    *(f"grpo_jax.environments.{name}" for name in ("registry", "suites", "suites.grids")),
    "grpo_jax.host_calls",
    "grpo_jax.importing",
}
# Rewards that cannot be traced, and simulators that are not JAX programs. Both are pure functions of their arguments.
CALLS_THE_HOST = "grpo_jax.host_calls"
HOST_LIBRARIES = {
    "jinja2", "json", "matplotlib", "optparse", "PIL", "rich", "safetensors", "sys", "tensorboardX",
    "tokenizers", "tqdm", "tyro", "wandb",
    "datetime", "io", "logging", "os", "pathlib", "shutil", "signal", "subprocess", "tempfile", "time",
}  # fmt: skip


def sources():
    """(dotted name inside the repository, path) of every module of the package and of the experiments."""
    for folder in ("grpo_jax", "experiments"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            yield ".".join(path.relative_to(REPOSITORY).with_suffix("").parts), path


MODULES = {name.removesuffix(".__init__"): path for name, path in sources()}
CORE = [name for name in MODULES if name.split(".")[0] == "grpo_jax"]


@functools.cache
def nodes(name):
    """All nodes of the syntax tree of a module, but for imports that only annotations need."""
    tree = ast.parse(MODULES[name].read_text())
    tree.body = [node for node in tree.body if not ast.unparse(node).startswith("if TYPE_CHECKING")]
    return list(ast.walk(tree))


@functools.cache
def imports(name):
    """Everything that a module imports, wherever in it, as absolute dotted names."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in nodes(name):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], base]).rstrip(".")
            submodules = (f"{base}.{alias.name}" for alias in node.names)
            found |= {submodule if submodule in MODULES else base for submodule in submodules}
    return found


def unit(module):
    """What a module is called in the map."""
    parts = module.split(".")
    return parts[1] if parts[0] == "grpo_jax" and len(parts) > 1 else parts[0]


def own(name):
    """What a module imports of ours."""
    return {module for module in imports(name) if module.split(".")[0] in ("grpo_jax", "experiments")}


def test_every_folder_has_a_place():
    assert {unit(name) for name in MODULES} - {"grpo_jax", "experiments"} == set(ORDER), "a new folder: give it a place"


def may_import(name, module):
    """Whether a module of a folder may import another of ours."""
    if not module.startswith("grpo_jax."):
        return module == "grpo_jax" and unit(name) == "commands"  # the public names, and the experiments
    above, below = unit(name), unit(module)
    if above == below:
        return True
    return ORDER.index(above) < ORDER.index(below) and not any({above, below} <= group for group in STRANGERS)


def test_imports_come_from_below():
    everything = [(name, module) for name in CORE if name != "grpo_jax" for module in own(name)]
    offenders = [f"{name} imports {module}" for name, module in everything if not may_import(name, module)]
    assert len(everything) > 100 and not offenders, "\n".join(offenders)


def test_there_are_no_cycles():
    graph = {name: own(name) - {name} for name in MODULES if name != "grpo_jax"}
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done or name not in graph:
            return
        path.append(name)
        for module in sorted(graph[name]):
            visit(module)
        done.add(path.pop())

    for name in graph:
        visit(name)


def test_gymnax_is_known_to_environments_alone():
    strangers = [name for name in CORE if unit(name) != "environments"]
    offenders = [name for name in strangers if "gymnax" in {module.split(".")[0] for module in imports(name)}]
    assert not offenders, "\n".join(offenders)


def test_clocks_disks_and_prints_are_the_hosts():
    offenders = []
    for name in CORE:
        if unit(name) in HOST or name in AT_THE_DOOR:
            continue
        calls = {node.func for node in nodes(name) if isinstance(node, ast.Call)}
        called = {function.id for function in calls if isinstance(function, ast.Name)} & {"print", "open", "input"}
        imported = HOST_LIBRARIES & {module.split(".")[0] for module in imports(name)}
        offenders += [f"{name} has {what}" for what in called | imported]
    assert not offenders, "\n".join(offenders)


def test_no_host_callback_is_in_the_core():
    callbacks, offenders = {"pure_callback", "io_callback", "debug_callback"}, []
    for name in MODULES:
        forbidden = callbacks - ({"pure_callback"} if name == CALLS_THE_HOST else set())
        forbidden |= set() if unit(name) in HOST | {"experiments"} else {"debug"}
        found = forbidden & {node.attr for node in nodes(name) if isinstance(node, ast.Attribute)}
        offenders += [f"{name} has {attribute}" for attribute in found]
    assert not offenders, "\n".join(offenders)
