"""The documentation: its code runs as printed, block after block, and what it promises of the command line holds."""

import pkgutil
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import grpo_jax
from grpo_jax import Algorithm, Config, Hyperparams, make_init, make_train_step, objectives
from grpo_jax.algorithms import ALGORITHMS
from grpo_jax.environments.suites import SUITES
from grpo_jax.environments.tokens import TASKS
from grpo_jax.language.rewards import call_rewards, sums
from grpo_jax.recording import Recording
from grpo_jax.runs.evaluations import GREEDY, SAMPLED
from grpo_jax.updates.optimizers import OPTIMIZERS
from grpo_jax.updates.schedules import DECAYS
from grpo_jax_cli import COMMANDS

REPOSITORY = Path(__file__).parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "docs").glob("*.md"))}
ENVIRONMENTS, TOKENS, LONG_RUNS = PAGES["environments.md"], PAGES["tokens.md"], PAGES["long_runs.md"]


def blocks(page):
    """The code that runs as printed; blocks marked `python no-run` do not."""
    return re.findall(r"```python\n(.*?)```", PAGES[page], flags=re.DOTALL)


def run_page(page, module="__main__", last=None):
    """The names that the blocks of a page define, one after the other, up to the number `last`."""
    names = {"__name__": module}
    for block in blocks(page)[:last]:
        exec(compile(block, page, "exec"), names)
    return names


CHECKS = {
    "accelerators.md": ["config.plan.steps_per_loop == 8"],
    "groups.md": [],
    "language_models.md": [
        "score(rewards, {'prompts': prompts.contents, 'completions': ['5', ' 9'], 'completion_ids': [[0], [0, 0]]}"
        " | prompts.fields).tolist() == [[1, jnp.float32(-0.01)], [0, jnp.float32(-0.02)]]"
    ],
}
SLOW_CHECKS = {
    "algorithms.md": ["state.hyperparams.auxiliary_coef == 0.5", "abs(loss) < 1e-6"],  # whitened: a mean of 0
    "environments.md": [
        "metrics['environment/steps'] > 0",
        "jnp.allclose(swept.rollout.environment_params['slip'][:, 0], slips)",
        "len(set(randomised.rollout.environment_params['slip'].reshape(-1, 16)[:, 0].tolist())) == 4",
    ],
    "many_devices.md": ["result.curves()['episode/return_mean'].shape == (4, 8, 10)", "len(policies) == 8"],
    "optimizers.md": ["metrics['optim/learning_rate'] == metrics['optim/critic_learning_rate'] == 0"],
    "own_loop.md": ["returns[-10:].mean() > 0.9"],
    "playing.md": ["Path('episode.gif').read_bytes().startswith(b'GIF8')"],
    "tokens.md": ["answers.correct.shape == (4, 8)", "metrics['episode/count'] == 16", "trained.steps[-1].max() > 0"],
    "trained_policies.md": ["actions.shape == (32,)", "arrays['params/actor/Dense_1/kernel'].shape == (4, 64, 64)"],
    "transformers.md": ["tokens.shape == log_probs.shape == (2, 4, 6)", "lengths.shape == (2, 4)"],
}
MODULE = {"environments.md": "corridor", "tokens.md": "my_tasks"}


@pytest.mark.parametrize("page", [*CHECKS, *(pytest.param(page, marks=pytest.mark.slow) for page in SLOW_CHECKS)])
def test_a_page_runs_as_printed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"jnp": jnp, "score": lambda *given: sums(call_rewards(*given)), "Path": Path}
    names |= run_page(page, MODULE.get(page, "__main__"))
    for check in (CHECKS | SLOW_CHECKS)[page]:
        assert eval(check, names), check


def test_an_environment_on_the_host_is_configured_as_printed():
    pytest.importorskip("gymnasium")
    assert run_page("host_environments.md")["config"].num_steps == 20


@pytest.mark.slow
def test_the_recorded_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, again = (run_page("long_runs.md", last=1)["result"] for _ in range(2))
    assert len(again.steps) == len(first.steps) == 39
    assert first.compile_seconds > 0 == again.compile_seconds
    evaluated = run_page("long_runs.md")["result"]
    assert evaluated.evaluations.sampled.shape == (len(evaluated.evaluations.steps), 2)


def test_lists_on_pages_are_whole():
    slots, _, _ = PAGES["algorithms.md"].partition("## The published algorithms")
    published = PAGES["algorithms.md"].partition("## The published algorithms")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", published, flags=re.MULTILINE)) == ALGORITHMS.keys()
    flags = {name for name, default in Algorithm._field_defaults.items() if default is False}
    assert set(re.findall(r"^\| `(\w+)` \|", slots, flags=re.MULTILINE)) == set(Algorithm._fields) - flags
    optimizers = set(re.findall(r'^\| `"(\w+)"`', PAGES["optimizers.md"], flags=re.MULTILINE))
    assert optimizers == {*OPTIMIZERS, *DECAYS}
    assert all(f"`{suite}:" in ENVIRONMENTS for suite in SUITES) and all(f"`tokens:{kind}-" in TOKENS for kind in TASKS)
    fields = *Recording.__dataclass_fields__, "evaluate_every", "evaluation_episodes", "stop_at_return"
    assert all(f"--{field.replace('_', '-')}" in LONG_RUNS for field in fields)


def test_the_metrics_of_a_run_are_those_described():
    controller = objectives.tuned(objectives.adaptive_coefficient, target="kl_target")
    of_entropy = objectives.tuned(objectives.adaptive_entropy_coefficient, target="entropy_target")
    adaptive = grpo_jax.with_reference(grpo_jax.GRPO)
    adaptive = adaptive._replace(kl_controller=controller, entropy_controller=of_entropy)
    keys = {SAMPLED, GREEDY, "environment/invalid_resets", "episode/cut_fraction"}  # of some environments
    for algorithm, hyperparams in ((adaptive, Hyperparams()), (grpo_jax.PPO, Hyperparams(critic_learning_rate=1e-3))):
        config = Config(algorithm=algorithm, num_envs=8, num_minibatches=2)
        state = jax.eval_shape(make_init(config), jax.random.key(0), hyperparams)
        keys |= jax.eval_shape(make_train_step(config), state)[1].keys()
    _, _, section = LONG_RUNS.partition("## The lines of metrics.jsonl")
    assert set(re.findall(r"`(\w+/\w+)`", section)) == keys


DOCUMENTS = {
    path: path.read_text(encoding="utf-8")
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "experiments/results/*/README.md")
    for path in sorted(REPOSITORY.glob(pattern))
}


def anchors(text):
    """The anchors of the headings of a page."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.M)}


def named(pattern):
    """(document, what it names) for each match of a pattern in the documents; there are some."""
    found = [(path, match) for path, text in DOCUMENTS.items() for match in re.findall(pattern, text, re.MULTILINE)]
    assert found, pattern
    return found


def leads_somewhere(path, link):
    """Whether the page of a link is there, and its heading."""
    target, _, anchor = link.partition("#")
    page = path.parent / target if target else path
    return page.exists() and (not anchor or anchor in anchors(page.read_text(encoding="utf-8")))


def exists(name):
    """Whether a dotted name can be imported."""
    try:
        return pkgutil.resolve_name(name) is not None
    except (AttributeError, ImportError):
        return False


def test_links_lead_somewhere():
    links = [(path, link) for path, link in named(r"\]\(([^)\s]+)\)") if not link.startswith("http")]
    offenders = [f"{path}: {link}" for path, link in links if not leads_somewhere(path, link)]
    assert not offenders, "\n".join(offenders)


def test_files_and_commands_that_are_named_exist():
    files = named(r"`((?:grpo_jax|examples|experiments|tests|docs|\.ci)/[\w./-]*)`")
    files += [(path, f"{name.replace('.', '/')}.py") for path, name in named(r"python -m (experiments\.\w+)")]
    commands, known = named(r"^(?:.*[`/ ])?grpo-jax ([a-z][a-z-]*)[ `]"), set().union(*COMMANDS.values())
    offenders = [f"{path}: {name}" for path, name in files if not (REPOSITORY / name).exists()]
    offenders += [f"{path}: {name}" for path, name in commands if name not in known]
    assert not offenders, "\n".join(offenders)


def test_dotted_names_exist():
    offenders = [f"{path}: {name}" for path, name in named(r"`(grpo_jax(?:\.\w+)+)") if not exists(name)]
    assert not offenders, "\n".join(offenders)
