"""The memory of training a language model, as XLA plans it."""

import pytest

from experiments.language_memory import Arguments, make_config, measure

SIZES = {"vocab_size": 50_000, "prompt_length": 8, "num_envs": 8, "num_minibatches": 1}


@pytest.mark.slow
def test_a_train_step_has_no_row_of_the_vocabulary_for_each_token():
    """At 50,000 words whole logits take over 1 MiB a token; in chunks a token takes less than 64 KiB."""

    def a_token(variant):
        lengths = 32, 64
        short, long = (
            measure(make_config(Arguments(**SIZES), "tiny", variant, length), "cpu")["temporary_bytes"]
            for length in lengths
        )
        return (long - short) / (32 * SIZES["num_envs"])

    assert a_token("whole logits") > 1024 * 1024
    assert a_token("chunks") < 64 * 1024
