"""The layer map, held by the imports themselves."""

import ast
from pathlib import Path

import pytest

import grpo_jax

PACKAGE = Path(grpo_jax.__file__).parent
REPOSITORY = PACKAGE.parent

# A module imports from its own layer and below. A folder is one module of this map.
LAYERS = [
    {"types", "hyperparams", "errors", "spaces"},
    {
        "advantages",
        "losses",
        "surrogates",
        "rewards",
        "divergences",
        "distributions",
        "shuffle",
        "gathering",
        "masking",
        "precision",
        "sharding",
        "baselines",
    },
    {"networks", "environments"},
    {"rollout", "groups", "slots", "baseline_slots", "algorithms", "updates", "config", "normalization", "sampling"},
    {"training", "collection", "evaluation", "generation", "memory", "debugging", "warm_start", "budget"},
    {"checkpoint", "logbook", "pretrained", "statistics", "results", "alarms", "trackers", "signals", "processes"},
    {"experiments"},
]
LAYER = {module: number for number, modules in enumerate(LAYERS) for module in modules}
HOST_LAYER = 5
DRAWS = "grpo_jax.environments.render"  # knows gymnax, and is the host's: nothing below the host imports it
HOST_LIBRARIES = {
    "json", "matplotlib", "optparse", "orbax", "PIL", "rich", "safetensors", "sys", "tensorboardX", "tokenizers",
    "tqdm", "tyro", "wandb",
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


def test_every_module_has_a_layer():
    assert {unit(name) for name in IDS} - {"grpo_jax"} <= set(LAYER), "give the new module a layer in this map"
    assert {"training", "environments", "logbook"} <= {unit(name) for name in IDS}


@each_module
def test_imports_come_from_the_same_layer_or_below(name):
    if name == "grpo_jax":
        return  # the public names, of any layer
    for module in own(name):
        # The package itself stands for all of its layers: only what stands above them may import that.
        layer = LAYER["experiments"] if module == "grpo_jax" else LAYER[unit(module)]
        assert layer <= LAYER[unit(name)], f"{name} imports {module}, which is of a layer above"


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
    if unit(name) in LAYER and LAYER[unit(name)] < HOST_LAYER and name != DRAWS:
        assert not (HOST_LIBRARIES | {DRAWS}) & {m for module in imports(name) for m in (module, module.split(".")[0])}
        calls = [node for node in ast.walk(ast.parse(MODULES[name].read_text())) if isinstance(node, ast.Call)]
        called = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        assert not called & {"print", "open", "input"}


@each_module
def test_no_host_callback_is_in_the_core(name):
    attributes = {n.attr for n in ast.walk(ast.parse(MODULES[name].read_text())) if isinstance(n, ast.Attribute)}
    allowed = {"pure_callback"} if name == "grpo_jax.rewards" else set()  # rewards that cannot be traced
    assert not attributes & {"pure_callback", "io_callback", "debug_callback"} - allowed
    if unit(name) in LAYER and LAYER[unit(name)] < HOST_LAYER:
        assert "debug" not in attributes


def test_the_package_itself_has_no_logic():
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    docstring, *statements = body
    assert isinstance(docstring, ast.Expr)
    for node in statements:
        is_all = isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
        assert is_all or isinstance(node, ast.ImportFrom), ast.unparse(node)
