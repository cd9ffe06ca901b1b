"""Stop strings end a completion at the token that completes them in its text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_models import make_model, make_task, make_tokenizer

from grpo_jax.errors import ConfigError
from grpo_jax.language import language_environment, load_model
from grpo_jax.language.tokenizer import Tokenizer, _token_bytes, stop_moves

STRINGS = "abab", "</a>", "aé", "\n\n", "aab"


def make_merging_tokenizer():
    """Tokens of one to four bytes, which may begin or end within a stop string or within a letter."""
    tokenizers = pytest.importorskip("tokenizers")
    byte = make_tokenizer().get_vocab()
    pairs = "a b", "ab a", "b a", "< /", "</ a", "> a", "Ċ Ċ", "a Ã", "a a", "ab ab", "© b"
    merges = [tuple(pair.split()) for pair in pairs]
    vocabulary = byte | {first + second: len(byte) + i for i, (first, second) in enumerate(merges)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(tokenizer, [vocabulary["<|im_end|>"]])


def test_a_string_is_found_where_the_text_first_contains_it():
    """Against the text of each prefix, in 300 random completions; special tokens add nothing to it."""
    tokenizer = make_merging_tokenizer()
    moves, lengths = stop_moves(STRINGS, tokenizer, tokenizer.num_tokens)
    assert lengths.tolist() == [4, 4, 3, 2, 3]
    token_bytes = _token_bytes(tokenizer, tokenizer.num_tokens)
    letters = [i for i, each in enumerate(token_bytes) if set(each) <= set("abé</>\n".encode())]
    rng, num_found = np.random.default_rng(0), 0
    for tokens in rng.choice(letters, size=(300, 12)):
        found = np.zeros(len(STRINGS), int)
        for end, token in enumerate(tokens, start=1):
            found = moves[np.arange(len(STRINGS)), found, token]
            text = tokenizer.decode(tokens[:end])
            assert (found == lengths).tolist() == [string in text for string in STRINGS], (text, end)
        num_found += (found == lengths).sum()
    assert num_found > 100


def test_an_episode_ends_with_the_string(tmp_path):
    task = make_task(load_model(make_model(tmp_path)), max_completion=6, stop_strings=("bc", "never"))
    encode, environment = task.model.tokenizer.encode_part, language_environment(task)
    params = environment.params

    def play(tokens):
        state, _ = environment.reset(jax.random.key(0), params)

        def step(state, token):
            moved = environment.step(None, state, token, params)
            return moved.state, (moved.terminated, moved.truncated)

        return jax.lax.scan(step, state, tokens)[1]

    texts = "abbcde", "abcbca", "xyzxyz"
    terminated, truncated = jax.jit(jax.vmap(play))(jnp.array([encode(text) for text in texts]))
    assert [np.flatnonzero(row).tolist() for row in np.asarray(terminated)] == [[3, 4, 5], [2, 3, 4, 5], []]
    assert truncated[2].tolist() == [False] * 5 + [True]
    assert task.is_cut(np.array([encode("xxxxbc"), encode("xyzxyz"), [*encode("x"), *[-1] * 5]])).tolist() == [0, 1, 0]
    assert task.digest != make_task(task.model, max_completion=6).digest


def test_wrong_strings_are_answered(tmp_path):
    model = load_model(make_model(tmp_path))
    for wrong in ("text", ("a", "")):
        with pytest.raises(ConfigError, match="must be texts that are not empty"):
            make_task(model, stop_strings=wrong)
    tokenizer = make_tokenizer()
    tokenizer.decoder = pytest.importorskip("tokenizers").decoders.Metaspace()
    with pytest.raises(ConfigError, match="need a tokenizer of bytes"):
        stop_moves(("a",), Tokenizer(tokenizer, [0]), 258)
