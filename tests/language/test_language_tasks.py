"""Language tasks: their environment, rewards called by compiled programs, stop strings."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_models import CHAT, lengths, make_model, make_params, make_task, make_tokenizer, numpy_forward
from small import begin

from grpo_jax import (
    Config,
    Evaluate,
    Hyperparams,
    Sampling,
    generate,
    make_learn,
    make_mesh,
    make_play,
    make_train_step,
    run,
)
from grpo_jax.environments.tokens import Completion
from grpo_jax.errors import ConfigError
from grpo_jax.language import (
    CompletionFile,
    Reward,
    Tokenizer,
    as_prompts,
    language_environment,
    load_model,
    save_model,
)
from grpo_jax.language.tokenizer import _token_bytes, stop_moves
from grpo_jax.policies import Transformer, categorical, make_token_policy
from grpo_jax.recording.identity import check_same, identity
from grpo_jax.runs.progress import initial_progress
from grpo_jax.training.host_side import host_outcome, with_choices
from grpo_jax.training.metrics import rollout_metrics
from grpo_jax.types import RewardParts, Trajectory

END = 0
KEYS = jax.random.split(jax.random.key(0), 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(make_model(tmp_path_factory.mktemp("model")))


def test_rewards_see_what_the_file_holds_and_the_limit_of_completions(model):
    def seen(prompts, completions, answer, max_completion, iteration):
        calls.append((prompts, completions, answer))
        assert (max_completion, set(iteration)) == ([4] * len(prompts), {3 if len(calls) == 1 else 0})
        return [1.0] * len(prompts)

    calls, a, rewards = [], model.tokenizer.encode("a")[0], (Reward("seen", seen), Reward("lengths", lengths, 0.5))
    tokens = np.array([[a, a, END, -1], [END, -1, -1, -1]])
    states = Completion(np.array([[1, 0]]), tokens[None], np.array([[3, 1]]))
    params = {"iteration": np.full((1, 2), 3), "seen": np.ones((1, 2)), "lengths": np.full((1, 2), 0.5)}
    parts = language_environment(make_task(model, rewards=rewards)).host.outcome(states, params)
    assert calls == [(["345", "12"], ["aa", ""], ["b", "a"])] and parts.values.tolist() == [[[1, 2], [1, 0]]]
    assert parts.weights.tolist() == [[[1, 0.5]] * 2]
    make_task(model, [{"messages": CHAT[1:2], "answer": 1}], rewards=rewards[:1]).judge(np.array([0]), np.array([[a]]))
    assert make_task(model, [{"prompt": "1", "table": np.eye(2)}]).digest, "a field may be any object"
    assert calls[1] == ([CHAT[1:2]], [[{"role": "assistant", "content": "a"}]], [1])


def test_another_reward_of_the_same_name_is_another_run(tmp_path):
    """Neither the place of the model nor the tokenizer is part of the comparison: the digest stands for them."""
    first, second = (load_model(make_model(tmp_path / place / "model")) for place in "ab")

    def described(model, function):
        task = make_task(model, rewards=(Reward("lengths", function),))
        return json.loads(json.dumps(identity(language_environment(task))))

    check_same(described(first, lengths), described(second, lengths), "environment")
    with pytest.raises(ConfigError, match=r"environment.reset.closure|environment.outcome.closure.task.identity.1"):
        check_same(described(first, lengths), described(first, lambda completions, **fields: [0.0]), "environment")


def test_embeddings_without_a_token_are_never_sampled(tmp_path):
    """The embeddings of published models are often padded."""
    architecture = Transformer(num_layers=1, width=16, num_heads=2, qk_norm=True)
    params = make_params(architecture, 300)
    save_model(tmp_path, architecture, params, make_tokenizer(), end_token="<|im_end|>", context=64)
    task = make_task(load_model(tmp_path))
    assert (task.model.num_tokens, task.model.architecture.vocab_size) == (258, 300)
    assert language_environment(task).action_space.num_actions == 258

    def logits(num_tokens):
        policy = make_token_policy(task.model.architecture, categorical(num_tokens), max_steps=2)

        @jax.jit
        def read(params):
            tokens, carry = jnp.array([[1], [2]]), policy.initial_carry(params, 1, jnp.array([[3]]))
            whole = policy.sequence(params, tokens, policy.sequence_carry(carry), jnp.zeros((2, 1), bool))[0]
            return policy.step(params, tokens[0], carry)[0], whole

        return read(params)

    for ours, all_of_them in zip(logits(258), logits(300), strict=True):
        np.testing.assert_array_equal(ours, all_of_them[..., :258])
    with pytest.raises(ConfigError, match="vocab_size=300, but the task has 301 tokens"):
        logits(301)


def test_an_episode_is_a_completion(model):
    task = make_task(model, held_out=as_prompts([{"prompt": "6", "answer": "c"}]))
    env = language_environment(task)
    keys, params = jax.random.split(jax.random.key(0), 16), dict(env.params)
    reset, step = jax.jit(jax.vmap(env.reset, in_axes=(0, None))), jax.jit(env.step)
    chosen = env.host.choose(keys[:1], 0, 2)
    assert {*chosen["prompt"][0].tolist()} == {0, 1}, "held-out prompts are never played"
    params |= {name: value[0, 0] for name, value in chosen.items()}
    states, observations = jax.device_get(reset(keys, params))
    state = jax.tree.map(lambda leaf: leaf[0], states)
    assert {*states.problem} == {chosen["prompt"][0, 0]} and {*observations} == {chosen["prompt_tokens"][0, 0, -1]}
    assert env.prompt(state, params).tolist() == chosen["prompt_tokens"][0, 0, :-1].tolist()
    for action in (5, 6, 7):
        moved = step(keys[0], state, action, params)
        assert not (moved.terminated or moved.truncated) and moved.observation == action
        state = moved.state
    assert step(keys[0], state, 8, params).truncated
    ended = step(keys[0], state, END, params)
    assert ended.terminated and not ended.truncated and ended.state.tokens.tolist() == [5, 6, 7, END]
    several = make_task(model._replace(tokenizer=Tokenizer(model.tokenizer.backend, [7, 9, END])))
    assert several.is_cut([[5, 5, 5, each] for each in (7, 8, 9, END)]).tolist() == [False, True, False, False]
    step = jax.jit(jax.vmap(language_environment(several).step, in_axes=(None, None, 0, None)))
    assert step(keys[0], state, jnp.array([7, 8, 9, END]), params).terminated.tolist() == [True, False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["envs", "model"])
def test_a_model_on_two_devices_is_as_on_one(model, axis):
    """Rewards are a call of the host, which gets the completions of all devices."""
    settings = {"num_envs": 8, "group_size": 4, "num_epochs": 1, "num_minibatches": 2, "logits_chunk": 16}
    config = Config(environment=language_environment(make_task(model)), network=model.architecture, **settings)
    one, two = (
        run(config, Hyperparams(num_iterations=2), jax.random.split(jax.random.key(0), 1), mesh=mesh)
        for mesh in (make_mesh(seeds=1, devices=jax.devices()[:1]), make_mesh(seeds=1, **{axis: 2}))
    )
    for a, b in zip(*(jax.tree.leaves((each.states.params, each.metrics)) for each in (one, two)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


def test_steps_are_paid_by_the_tokens_that_end_them(model):
    """A token is a byte; the last one is the end token, which has no text."""
    by_line = Reward("by_line", lambda completions: [[(2, 1), (len(text), 0.5)] for text in completions])
    rewards = by_line, Reward("lengths", lengths)
    task = make_task(model, rewards=rewards, max_completion=6, process_rewards=True)
    tokens = np.full((2, 6), -1)
    for row, text in enumerate(("é\na", "12\n4")):
        ids = [*model.tokenizer.encode(text), END]
        tokens[row, : len(ids)] = ids
    assert task.judge(np.zeros(2, int), tokens)[0].tolist() == [[1.5, 3], [1.5, 4]]
    values, rewarded = task.judge(np.zeros(2, int), tokens, steps=True)
    assert values.shape == (2, 6, 2) and values[..., 1].tolist() == [[0, 0, 0, 0, 3, 0], [0, 0, 0, 0, 4, 0]]
    assert values[..., 0].tolist() == [[0, 0, 1, 0.5, 0, 0], [0, 1, 0, 0.5, 0, 0]], "the first character has two bytes"
    assert rewarded.any(-1).tolist() == [[0, 0, 1, 1, 1, 0], [0, 1, 0, 1, 1, 0]]

    states = Completion(np.zeros(2, np.int32), tokens.astype(np.int32), np.array([5, 5], np.int32))
    weights = {"by_line": np.float32([1, 2]), "lengths": np.float32([0.1, 0.2]), "iteration": np.zeros(2, int)}
    parts = language_environment(task).host.outcome(states, weights)
    assert (parts.values == values).all() and (parts.rewarded == rewarded).all()
    assert parts.weights[1].tolist() == [[2, np.float32(0.2)]] * 6


def test_a_reward_of_none_counts_in_no_mean_and_no_deviation(model):
    """The first is 1 wherever it applies, and the second always, so there is nothing to learn."""
    odd = Reward("odd", lambda completion_ids: [1.0 if ids[0] % 2 else None for ids in completion_ids])
    rewards = odd, Reward("one", lambda completions: [1.0] * len(completions))
    task = make_task(model, rewards=rewards, max_completion=2)
    sizes = {"num_envs": 16, "group_size": 16, "num_minibatches": 1, "num_epochs": 1}
    config = Config(environment=language_environment(task), algorithm="gdpo", network=model.architecture, **sizes)
    values, applies = task.judge(np.zeros(16, int), np.array([[number, END] for number in range(5, 21)]))
    assert values[:2].tolist() == [[1, 1], [0, 1]] and applies[:2].tolist() == [[True, True], [False, True]]

    @jax.jit
    def read(values, applies):
        valid, is_last = jnp.ones((2, 16), bool), jnp.arange(2)[:, None, None] == 1
        parts = RewardParts(values * is_last, jnp.ones((2, 16, 2)), applies & is_last)
        played = Trajectory(**dict.fromkeys(Trajectory._fields))._replace(
            **{"valid": valid, "terminated": valid & is_last[..., 0], "truncated": ~valid, "reward_parts": parts},
            **{"reward": parts.total, "episode_return": parts.total, "episode_length": jnp.full((2, 16), 2)},
        )
        advantage = config.algorithm.advantage(played, Hyperparams(), config.group_size)
        return rollout_metrics(config, played, types.SimpleNamespace(advantage=advantage, mask=valid, value=None))

    metrics = read(values, applies)
    found = [metrics[name].item() for name in ("reward/odd_mean", "reward/odd_std", "advantage/abs_mean")]
    assert found == [1, 0, 0] and metrics["episode/return_mean"] == 1.5, "odd applies to half of the completions"


def test_other_prompts_need_no_other_program(model):
    """Nor another order, to train or to complete; completions are those of the prompts that were given."""
    rows, key = [{"prompt": text, "answer": ""} for text in ("12", "345", "6", "78")], jax.random.key(1)
    tasks = make_task(model, rows), make_task(model, rows[::-1])
    sizes = {"num_envs": 4, "group_size": 2, "num_minibatches": 1, "network": model.architecture}
    configs = [Config(environment=language_environment(task), **sizes) for task in tasks]
    state, programs = begin(configs[0]), []
    for config, task in zip(configs, tasks, strict=True):
        complete = jax.jit(functools.partial(generate, config.policy, sampling=Sampling(temperature=0)))
        lowered = complete.lower(state.params, task.tokens, key)
        programs.append((jax.jit(make_play(config)).lower(state), lowered))
    assert len({tuple(program.as_text() for program in each) for each in programs}) == 1
    play = programs[0][1].compile()
    completions, others = (np.asarray(play(state.params, task.tokens, key).tokens) for task in tasks)
    assert (completions == others[::-1]).all() and len(np.unique(completions, axis=0)) > 1


def test_a_model_completes_texts(model):
    """Greedily, as a NumPy model does, or by samples, which end with a stop string."""
    short, tokens = {"max_completion": 5}, model.tokenizer.encode("12")
    for _ in range(5):
        features, weights = numpy_forward(model.folder, tokens)
        tokens.append(int((features[-1] @ weights["lm_head.weight"].T).argmax()))
    assert model.complete(["345", "12"], **short)[1] == model.tokenizer.decode(tokens[2:], tokens[:2])
    first, again, other = (
        model.complete(["345"], jax.random.key(seed), num_samples=64, stop_strings=["e", "7"], **short)[0]
        for seed in (0, 0, 1)
    )
    assert first == again != other and len(first) == 64
    assert any(text[-1:] in ("e", "7") for text in first) and not any({"e", "7"} & {*text[:-1]} for text in first)
    with pytest.raises(ConfigError, match="samples need a key"):
        model.complete(["345"], num_samples=2)


def test_what_does_not_fit_the_model_is_named(model):
    small, spaces = dataclasses.replace(model.architecture, vocab_size=20), make_tokenizer()
    spaces.decoder = pytest.importorskip("tokenizers").decoders.Metaspace()
    rows, long = [{"prompt": "1"}], [{"prompt": "1"}, {"prompt": "1" * 61}]
    for changes, message in (
        ({"rows": long}, "prompt 1: the prompt has 61 tokens, and 65 with .* context of 64; shorten"),
        ({"rows": [{"prompt": ""}]}, "prompt 0: the prompt has no tokens"),
        ({"rows": [{"prompt": "\ud83d"}]}, "prompt 0: .* is not a text in Unicode"),
        ({"held_out": as_prompts(rows)}, "held-out prompts have the fields .*answer"),
        ({"max_completion": 0}, "max_completion=0 is not a positive integer"),
        ({"model": model._replace(architecture=small)}, "has the token .* but the model only vocab_size=20"),
        *(({"stop_strings": wrong}, "must be texts that are not empty") for wrong in ("text", ("a", ""))),
        ({"model": model._replace(tokenizer=Tokenizer(spaces, [0])), "stop_strings": ("a",)}, "a tokenizer of bytes"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_task(**{"model": model} | changes)


ROWS = [{"prompt": str(number), "answer": ""} for number in range(10)]


@pytest.mark.slow
def test_the_host_plays_and_rewards_all_prompts_in_turn(model, tmp_path):
    """Of two seeds at once, of which one stops; a file of completions; and the same in a loop of one's own."""

    def seen(prompts, completions, iteration):
        calls.append(prompts[::2])
        iterations.append(sorted({*iteration}))
        return lengths(completions)

    calls, iterations = [], []
    task = make_task(model, ROWS, rewards=(Reward("seen", seen),))
    sizes = {"num_envs": 8, "group_size": 2, "num_minibatches": 2, "num_epochs": 1}
    config = Config(environment=language_environment(task), network=model.architecture, **sizes)
    hyperparams, limits = Hyperparams(), np.array([5, 2])
    write = CompletionFile(tmp_path / "kept", task, 6)
    result = run(config, hyperparams.replace(num_iterations=limits), KEYS, callback=write)
    assert [len(prompts) for prompts in calls] == [8, 8, 4, 4, 4] and result.ended_by.tolist() == ["num_iterations"] * 2
    assert iterations == [[0], [1], [2], [3], [4]]
    trained, first = calls[:2], [prompt for prompts in calls for prompt in prompts[:4]]
    assert sorted(first[:10]) == sorted(first[10:]) == [row["prompt"] for row in ROWS] and first[:10] != first[10:]
    assert calls[0][4:] != calls[0][:4], "each seed has an order of its own"

    kept = [json.loads(line) for line in (tmp_path / "kept").read_text().splitlines()]
    assert [line["iteration"] for line in kept if line["seed"]] == [0] * 6 + [1] * 6 and len(kept) == 7 * 6
    assert [line["prompt"] for line in kept if not line["seed"]][:12:2] == [*first[:3], *first[4:7]]
    for one, other in zip(kept[::2], kept[1::2], strict=True):
        assert one["rewards"] == {"seen": len(one["completion"])} and one["prompt"] == other["prompt"]
        sign = np.sign(one["reward"] - other["reward"])
        assert [one["advantage"], other["advantage"]] == pytest.approx([sign, -sign], abs=1e-4)
    write(initial_progress(None, 2)._replace(iteration=1), None)
    assert (tmp_path / "kept").read_text().count("\n") == 12, "a resumed run goes on from here"

    states = jax.tree.map(lambda leaf: leaf[None], begin(config, hyperparams.replace(num_iterations=5.0)))
    calls.clear()
    play, learn = (jax.jit(jax.vmap(make(config))) for make in (make_play, make_learn))
    for iteration in range(2):
        states = with_choices(config, states, KEYS[:1], iteration)
        played = play(states)
        states, metrics = learn(states, played, host_outcome(config, played))
    assert calls == [prompts[:4] for prompts in trained] and metrics["episode/return_mean"] > 0
    refused = functools.partial(run, config, hyperparams, KEYS, evaluate=Evaluate(every=1))
    for call in (functools.partial(make_train_step, config), refused):
        with pytest.raises(ConfigError, match="with prompts' is rewarded on the host"):
            call()


STRINGS = "abab", "</a>", "aé", "\n\n", "aab"


def merging_tokenizer():
    """Tokens of one to four bytes, which may begin or end within a stop string or within a letter."""
    made, byte = make_tokenizer(), make_tokenizer().get_vocab()
    merges = [tuple(pair) for pair in map(str.split, "a b,ab a,b a,< /,</ a,> a,Ċ Ċ,a Ã,a a,ab ab,© b".split(","))]
    vocabulary = byte | {first + second: len(byte) + i for i, (first, second) in enumerate(merges)}
    made.model = type(made.model)(vocabulary, merges)
    return Tokenizer(made, [END])


def test_a_string_is_found_where_the_text_first_contains_it():
    """Against the text of each prefix, in 300 random completions; special tokens add nothing to it."""
    tokenizer = merging_tokenizer()
    moves, lengths = stop_moves(STRINGS, tokenizer, tokenizer.num_tokens)
    assert lengths.tolist() == [4, 4, 3, 2, 3]
    token_bytes = _token_bytes(tokenizer, tokenizer.num_tokens)
    letters = [i for i, each in enumerate(token_bytes) if set(each) <= set("abé</>\n".encode())]
    num_found = 0
    for tokens in np.random.default_rng(0).choice(letters, size=(300, 12)):
        found = np.zeros(len(STRINGS), int)
        for end, token in enumerate(tokens, start=1):
            found = moves[np.arange(len(STRINGS)), found, token]
            text = tokenizer.decode(tokens[:end])
            assert (found == lengths).tolist() == [string in text for string in STRINGS], (text, end)
        num_found += (found == lengths).sum()
    assert num_found > 100


def test_an_episode_ends_with_the_string(model):
    task = make_task(model, max_completion=6, stop_strings=("bc", "never"))
    encode, environment = model.tokenizer.encode, language_environment(task)

    def play(tokens):
        def step(state, token):
            moved = environment.step(None, state, token, environment.params)
            return moved.state, (moved.terminated, moved.truncated)

        params = jax.tree.map(jnp.asarray, dict(environment.params))
        return jax.lax.scan(step, environment.reset(jax.random.key(0), params)[0], tokens)[1]

    texts = "abbcde", "abcbca", "xyzxyz"
    terminated, truncated = jax.jit(jax.vmap(play))(jnp.array([encode(text) for text in texts]))
    assert [np.flatnonzero(row).tolist() for row in np.asarray(terminated)] == [[3, 4, 5], [2, 3, 4, 5], []]
    assert truncated[2].tolist() == [False] * 5 + [True]
    assert task.is_cut(np.array([encode("xxxxbc"), encode("xyzxyz"), [*encode("x"), *[-1] * 5]])).tolist() == [0, 1, 0]
    assert task.digest != make_task(model, max_completion=6).digest
