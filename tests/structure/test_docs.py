"""The documentation: its code runs as printed, block after block, and what it promises of the command line holds."""

import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import grpo_jax
from grpo_jax import Config, Hyperparams, make_init, make_train_step, objectives
from grpo_jax.language.rewards import call_rewards, totals
from grpo_jax.runs.evaluations import GREEDY, SAMPLED
from grpo_jax.training.checks import check_run

REPOSITORY = Path(__file__).parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "docs").glob("*.md"))}
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def blocks(text):
    """The code that runs as printed; blocks marked `python no-run` do not."""
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def run_page(page, module="__main__"):
    """The names that the blocks of a page define, one after the other."""
    names = {"__name__": module}
    for block in blocks(PAGES[page]):
        exec(compile(block, page, "exec"), names)
    return names


def test_the_first_block_of_the_readme_asks_for_a_run_that_there_is(monkeypatch, capsys):
    """All but the training: names, fields, rows, and a train step on shapes."""

    def run_on_shapes(config, hyperparams, keys):
        check_run(config, hyperparams)
        return SimpleNamespace(final_return=np.zeros(len(keys)))

    monkeypatch.setattr(grpo_jax, "run", run_on_shapes)
    exec(compile(blocks(README)[0], "README.md", "exec"), {})
    assert capsys.readouterr().out == "[0. 0. 0. 0.]\n"


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks(README))
def test_blocks_of_the_readme_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # One train step of short episodes tells as much as many of long ones.
    for number, smaller in {"150_000": "4_096", "200_000": "3_000", "num_seeds=8": "num_seeds=1"}.items():
        block = block.replace(number, smaller)
    block = block.replace('"grpo", total', '"grpo", env_params={"max_steps_in_episode": 20}, total')
    exec(compile(block, "README.md", "exec"), {})


CHECKS = {
    "accelerators.md": ["config.plan.steps_per_loop == 8"],
    "groups.md": [],
    "host_environments.md": ["config.num_steps == 20"],
    "language_models.md": [
        "score(rewards, {'prompts': prompts.contents, 'completions': ['5', ' 9'], 'completion_ids': [[0], [0, 0]]}"
        " | prompts.fields).tolist() == [[1, jnp.float32(-0.01)], [jnp.float32(0.2), jnp.float32(-0.02)]]"
    ],
}
SLOW_CHECKS = {
    "algorithms.md": ["state.hyperparams.auxiliary_coef == 0.5"],
    "environments.md": [
        "metrics['environment/steps'] > 0",
        "jnp.allclose(swept.rollout.environment_params['slip'][:, 0], slips)",
        "len(set(randomised.rollout.environment_params['slip'].reshape(-1, 16)[:, 0].tolist())) == 4",
    ],
    "long_runs.md": ["result.evaluations.sampled.shape == (len(result.evaluations.steps), 2)"],
    "many_devices.md": ["result.ranking[0].result.steps.shape == (10, 8)", "len(policies) == 8"],
    "optimizers.md": ["metrics['optim/learning_rate'] == 0"],
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
    names = {"jnp": jnp, "score": lambda *given: totals(call_rewards(*given))[0], "Path": Path}
    names |= run_page(page, MODULE.get(page, "__main__"))
    for check in (CHECKS | SLOW_CHECKS)[page]:
        assert eval(check, names), check


def test_the_metrics_of_a_run_are_those_described():
    controller = objectives.with_hyperparams(objectives.adaptive_coefficient, target="kl_target")
    of_entropy = objectives.with_hyperparams(objectives.adaptive_entropy_coefficient, target="entropy_target")
    adaptive = grpo_jax.with_reference(grpo_jax.GRPO)
    adaptive = adaptive._replace(kl_controller=controller, entropy_controller=of_entropy)
    adaptive = adaptive._replace(hyperparams=objectives.EntropyHyperparams)
    keys = {SAMPLED, GREEDY, "environment/invalid_resets", "episode/cut_fraction"}  # of some environments
    keys |= {"episode/turns_mean", "episode/answers_fraction"}
    for algorithm in (adaptive, grpo_jax.PPO):
        config = Config(algorithm=algorithm, num_envs=8, num_minibatches=2)
        state = jax.eval_shape(make_init(config), jax.random.key(0), Hyperparams())
        keys |= jax.eval_shape(make_train_step(config), state)[1].keys()
    _, _, section = PAGES["long_runs.md"].partition("## The lines of metrics.jsonl")
    assert set(re.findall(r"`(\w+/\w+)`", section)) == keys


DOCUMENTS = {
    path: path.read_text(encoding="utf-8")
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "experiments/results/**/README.md")
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


def test_files_and_names_exist():
    files = named(r"`((?:grpo_jax|examples|experiments|tests|docs|\.ci)/[\w./-]*)`")
    offenders = [f"{path}: {name}" for path, name in files if not (REPOSITORY / name).exists()]
    offenders += [f"{path}: {name}" for path, name in named(r"`(grpo_jax(?:\.\w+)+)") if not exists(name)]
    assert not offenders, "\n".join(offenders)
