"""The order of the folders, held by the imports themselves."""

import ast
from pathlib import Path

import pytest

import grpo_jax

PACKAGE = Path(grpo_jax.__file__).parent
REPOSITORY = PACKAGE.parent

# From the top: a folder, or a module of the package itself, imports only from what stands below it.
ORDER = (
    *("language", "recording", "training", "evaluation", "config", "updates", "algorithms", "rollouts", "policies"),
    *("objectives", "environments", "devices", "host_calls", "observations", "precision", "types"),
    *("hyperparams", "importing", "errors"),
)
STRANGERS = {"objectives", "environments", "devices"}  # which do not know each other
HOST = {"recording", "language"}
DRAWS = "grpo_jax.environments.rendering"  # knows gymnax, and is the host's: nothing below the host imports it
# Rewards that cannot be traced, and simulators that are not JAX programs. Both are pure functions of their arguments.
CALLS_THE_HOST = "grpo_jax.host_calls"
HOST_LIBRARIES = {
    "jinja2", "json", "matplotlib", "optparse", "orbax", "PIL", "rich", "safetensors", "sys", "tensorboardX",
    "tokenizers", "tqdm", "tyro", "wandb",
}  # fmt: skip


def sources():
    """(dotted name inside the repository, path) of every module of the package and of the experiments."""
    for folder in ("grpo_jax", "experiments"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            yield ".".join(path.relative_to(REPOSITORY).with_suffix("").parts), path


MODULES = {name.removesuffix(".__init__"): path for name, path in sources()}
IDS = sorted(MODULES)
each_module = pytest.mark.parametrize("name", IDS)


def imports(name):
    """Everything that a module imports, wherever in it, as absolute dotted names."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], base]).rstrip(".")
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield submodule if submodule in MODULES else base


def unit(module):
    """What a module is called in the map."""
    parts = module.split(".")
    return parts[1] if parts[0] == "grpo_jax" and len(parts) > 1 else parts[0]


def own(name):
    """What a module imports of ours."""
    return {module for module in imports(name) if module.split(".")[0] in ("grpo_jax", "experiments")}


def test_every_folder_has_a_place():
    assert {unit(name) for name in IDS} - {"grpo_jax", "experiments"} == set(ORDER), "give the new folder a place here"


@each_module
def test_imports_come_from_below(name):
    if name == "grpo_jax" or unit(name) == "experiments":
        return  # the public names, and what uses them
    for module in own(name):
        assert module.startswith("grpo_jax."), f"{name} imports {module}, which stands above the package"
        if unit(module) != unit(name):
            assert ORDER.index(unit(module)) > ORDER.index(unit(name)), (
                f"{name} imports {module}, which stands above it"
            )
            assert not {unit(module), unit(name)} <= STRANGERS, f"{name} imports {module}, which it should not know"


def test_commands_import_from_the_harness_and_not_from_each_other():
    commands = {name for name in IDS if name.startswith("experiments.") and not name.startswith("experiments.harness")}
    for name in IDS:
        if name.startswith("experiments.harness"):
            assert not own(name) & commands, f"{name} imports a command"


def test_there_are_no_cycles():
    graph = {name: own(name) - {name} for name in IDS if name != "grpo_jax"}
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


@each_module
def test_gymnax_is_known_to_environments_alone(name):
    if unit(name) != "environments" and unit(name) != "experiments":
        assert "gymnax" not in {module.split(".")[0] for module in imports(name)}


@each_module
def test_input_and_output_are_the_hosts(name):
    if unit(name) not in HOST | {"experiments"} and not name.startswith(DRAWS):
        assert not (HOST_LIBRARIES | {DRAWS}) & {m for module in imports(name) for m in (module, module.split(".")[0])}
        calls = [node for node in ast.walk(ast.parse(MODULES[name].read_text())) if isinstance(node, ast.Call)]
        called = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        assert not called & {"print", "open", "input"}


@each_module
def test_no_host_callback_is_in_the_core(name):
    attributes = {n.attr for n in ast.walk(ast.parse(MODULES[name].read_text())) if isinstance(n, ast.Attribute)}
    allowed = {"pure_callback"} if name == CALLS_THE_HOST else set()
    assert not attributes & {"pure_callback", "io_callback", "debug_callback"} - allowed
    if unit(name) not in HOST | {"experiments"}:
        assert "debug" not in attributes


def test_the_package_itself_has_no_logic():
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    docstring, *statements = body
    assert isinstance(docstring, ast.Expr)
    for node in statements:
        is_public = isinstance(node, ast.Assign) and node.targets[0].id in ("__all__", "__version__")
        is_public |= isinstance(node, ast.FunctionDef) and node.name == "__dir__"
        assert is_public or isinstance(node, ast.ImportFrom), ast.unparse(node)
