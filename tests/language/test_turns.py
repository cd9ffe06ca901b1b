"""Several turns: answers to completions, their tokens, and conversations as rewards see them."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_models import CHATML, TEMPLATES, make_model, make_task

from grpo_jax import Config, Hyperparams, Sampling, generate, make_learn, make_play
from grpo_jax.errors import ConfigError
from grpo_jax.language import Reward, RewardError, Tokenizer, language_environment, load_model, load_tokenizer
from grpo_jax.policies import categorical, make_token_policy
from grpo_jax.training.host_side import host_outcome, played_with_host, with_choices
from grpo_jax.training.train_step import initial_state

END, PAD = 0, -1
ROWS = [{"messages": [{"role": "user", "content": text}]} for text in ("1", "22")]
TRIM = {"trim": CHATML.replace("message.content", "message.content | trim")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(make_model(tmp_path_factory.mktemp("model"), context=256))


def turns(model, respond=lambda messages: messages[-1]["content"] if len(messages) < 4 else None, rows=ROWS, **changes):
    return make_task(model, rows, **{"respond": respond, "max_completion": 50} | changes)


def answered(task, *texts):
    """Completions of the first prompt, `[N, L]`, and the answers to them."""
    length, rows = task.max_completion, [[*task.model.tokenizer.encode(text), END] for text in texts]
    tokens = np.array([(row + [PAD] * length)[:length] for row in rows])
    return tokens, task.conversations.answer(np.zeros(len(rows), int), tokens, np.full(tokens.shape, PAD, np.int32))


@pytest.mark.parametrize("name", ["chatml", "default system message", "trim"])
def test_the_tokens_of_an_answer_are_those_of_the_whole_conversation(tmp_path, name):
    tokenizer = load_tokenizer(make_model(tmp_path, chat_template=(TEMPLATES | TRIM)[name]))
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "a"}]
    for answer in ({"role": "user", "content": "b"}, {"role": "tool", "content": "é\n"}):
        before, whole = tokenizer.encode(chat), tokenizer.encode([*chat, answer])
        assert whole == before + tokenizer.encode_reply(chat, answer, after=5)
        assert whole[len(before) :] == [END, *tokenizer.encode_reply(chat, answer, after=END)]


def test_what_has_ended_is_answered_and_the_limit_cuts_an_answer(model):
    task = turns(model, lambda messages: {"a": "b", "c": "b" * 99}.get(messages[-1]["content"]))
    tokens, answers = answered(task, "a", "8", "c", "d" * 60)
    assert (answers[0, 2:40] >= 0).any() and (answers[3] == PAD).all(), "what is cut gets no answer"
    assert (answers[1] == PAD).all() and (answers[2, 2:] >= 0).all()
    after = np.where(answers >= 0, answers, tokens)
    after[0, [row.tolist().index(PAD) for row in after[:1]]] = END
    said = task.texts(np.zeros(4, int), after, answers)
    assert said == [["a", "b", ""], ["8"], ["c"], ["d" * 50]], "a reward does not see an answer that was cut"
    assert task.conversations.answer(np.zeros(4, int), after, answers) is None


def test_nobody_is_asked_twice_and_a_message_stays_with_its_conversation(model):
    asked = []

    def respond(messages):
        asked.append(messages[-1]["content"])
        length = len(asked[-1])
        return "b" * 99 if length == 3 else {"role": "tool", "content": "5", "length": length} if length < 3 else None

    task = turns(model, respond)
    tokens, answers = answered(task, "a", "cc", "ddd", "eeee")
    after = np.where(answers >= 0, answers, tokens)
    seen = task.conversations.messages(np.zeros(4, int), after, answers)
    assert [chat[1:2] and chat[1]["length"] for chat in seen] == [1, 2, [], []]
    assert task.conversations.answer(np.zeros(2, int), after[2:], answers[2:]) is None
    assert asked == ["a", "cc", "ddd", "eeee"]


async def later(messages):
    await asyncio.sleep(0)
    return {"role": "tool", "content": "5"}


def test_what_respond_may_return_and_what_is_refused(model, tmp_path):
    task = turns(model, later)
    answered(task, "a")
    assert [*task.conversations.messages_of.values()] == [{"role": "tool", "content": "5"}]
    for respond, message in (
        (lambda messages: {}["no tool"], r"respond raised KeyError: 'no tool' \(.*test_turns.py, line \d+\); let it"),
        (lambda messages: 5, "respond returned 5; let it return the text of an answer"),
        (lambda messages: {"role": "assistant", "content": "a"}, "respond returned {'role': 'assistant'"),
    ):
        with pytest.raises(RewardError, match=message):
            answered(turns(model, respond), "a")
    for changes, message in (
        ({"rows": [{"prompt": "1"}]}, "prompt 0: respond needs chats that end with a user's message, not '1'"),
        ({"respond": 3.14}, "respond=3.14 is no function"),
        ({"max_turns": 0}, "max_turns=0 is not a positive integer"),
        ({"process_rewards": True}, "rewards of steps are for a single turn"),
    ):
        with pytest.raises(ConfigError, match=message):
            turns(model, **changes)
    forgets = load_model(make_model(tmp_path, chat_template=CHATML.replace("message.content", "message.content[-2:]")))
    with pytest.warns(UserWarning, match="changes earlier messages of the assistant"):
        turns(forgets, max_completion=8)
    plain = "{% for message in messages if message.role != 'tool' %}{{ message.content }}{% endfor %}"
    plain = load_model(make_model(tmp_path / "plain", chat_template=plain))
    with pytest.raises(ConfigError, match="chat template leaves out a part of {'role': 'tool'"):
        answered(turns(plain, later, max_completion=8), "a")
    assert answered(turns(plain, lambda messages: "", max_completion=8), "a")[1] is None


@pytest.mark.slow
def test_answers_are_played_into_completions(model):
    """The same key gives the same tokens up to an answer; after it the policy has read it."""
    limit, key, reply, params = 12, jax.random.key(0), np.array([5, 6, END, 7]), model.params()
    policy = make_token_policy(model.architecture, categorical(model.num_tokens), max_steps=limit)
    prompts, sampling = jnp.array([[3, 4]]), Sampling(4, limit, tuple(range(100)))
    first = generate(policy, params, prompts, key, sampling)
    row = int(np.argmin(np.asarray(first.lengths[0])))
    end, answers = int(first.lengths[0, row]), np.full((1, 4, limit), PAD, np.int32)
    answers[0, row, end : end + len(reply)] = reply
    second = generate(policy, params, prompts, key, sampling._replace(answers=answers))
    np.testing.assert_array_equal(np.delete(second.tokens[0], row, 0), np.delete(first.tokens[0], row, 0))
    tokens, length = np.asarray(second.tokens[0, row]), int(second.lengths[0, row])
    np.testing.assert_array_equal(tokens[: end + len(reply)], [*first.tokens[0, row, :end], *reply])
    assert length > end + len(reply) and (tokens[end + len(reply) : length - 1] >= 100).all()
    whole = np.concatenate([[4], tokens[: length - 1]])[:, None]
    carry = policy.sequence_carry(policy.initial_carry(params, 1, prompts[:, :-1]))
    logits = policy.sequence(params, jnp.asarray(whole), carry, jnp.zeros(whole.shape, bool))[0][:, 0]
    log_probs = jax.nn.log_softmax(logits)[np.arange(length), tokens[:length]]
    np.testing.assert_allclose(second.log_probs[0, row, :length], log_probs, atol=2e-5)


@pytest.mark.slow
def test_a_rollout_is_played_until_nothing_is_answered(model):
    """Of two seeds: what was answered is in what is rewarded, and no answer is trained on."""
    tokenizer = Tokenizer(model.tokenizer.backend, range(0, 258, 3), model.tokenizer.template)
    asked, judged = [], []

    def respond(messages):
        asked.append(messages)
        return "7" if len(messages[-1]["content"]) % 2 else None

    def seen(prompts, completions):
        judged.extend([*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True))
        return [0.0] * len(prompts)

    task = turns(model._replace(tokenizer=tokenizer), respond, rewards=(Reward("seen", seen),), max_turns=3)
    sizes = {"num_envs": 8, "group_size": 4, "num_minibatches": 1, "num_epochs": 1}
    config = Config(environment=language_environment(task), network=model.architecture, **sizes)
    keys = jax.random.split(jax.random.key(1), 2)
    init = jax.jit(jax.vmap(lambda key: initial_state(config, key, Hyperparams())))
    states = with_choices(config, init(keys), keys, 0)
    played = played_with_host(config, jax.jit(jax.vmap(make_play(config))), states)
    outcome = host_outcome(config, played)
    assert all(any(chat[: len(messages)] == messages for chat in judged) for messages in asked) and len(asked) > 16
    spoken = np.array([sum(message["role"] == "assistant" for message in chat) for chat in judged]).reshape(2, 8)
    forced, answers = played.trajectory.forced, played.rollout.environment_params["answers"]
    valid = jnp.swapaxes(played.trajectory.valid, 1, 2)
    np.testing.assert_array_equal(jnp.swapaxes(forced, 1, 2) & valid, (answers >= 0) & valid)
    assert spoken.max() == 3 and not (played.trajectory.acted & forced).any()
    metrics = jax.eval_shape(jax.vmap(make_learn(config)), states, played, outcome)[1]
    assert metrics["episode/turns_mean"].shape == metrics["episode/answers_fraction"].shape == (2,)
