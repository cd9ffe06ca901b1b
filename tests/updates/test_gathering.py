"""Samples come out of a batch bit by bit as they went in, whatever lies beside them."""

import jax
import numpy as np

from grpo_jax.updates.gathering import make_gather

NUM_STEPS, NUM_ENVS = 3, 50
SHAPE = (NUM_STEPS, NUM_ENVS)
RNG = np.random.default_rng(0)
INDICES = np.array([7, 49, 0, 0, 12])


def anything(shape, dtype):
    """Any values there are: for floats NaN with a payload, -0 and denormals too."""
    return RNG.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype).reshape(shape)


def mixed():
    return {
        "float": anything(SHAPE, np.float32),
        "integers": anything((*SHAPE, 2), np.int32),
        "words": anything((*SHAPE, 2, 3), np.uint32),
        "truth": RNG.random(SHAPE) < 0.5,
        "masks": RNG.random((*SHAPE, 5)) < 0.5,
        "image": anything((*SHAPE, 4, 4), np.uint8),
        "wide": anything((*SHAPE, 40), np.float32),
        "half": anything(SHAPE, np.float16),
        "nothing": None,
    }


def test_what_comes_out_is_what_went_in():
    batch = mixed()
    samples = jax.jit(lambda batch, indices: make_gather(batch)(indices[None]))(batch, INDICES)
    assert samples.keys() == batch.keys() and samples["nothing"] is None
    for name in batch.keys() - {"nothing"}:
        expected, actual = batch[name][:, INDICES], np.asarray(samples[name])
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
        assert actual.tobytes() == expected.tobytes(), name


def num_gathers(batch):
    return str(jax.make_jaxpr(lambda batch: make_gather(batch)(INDICES[None]))(batch)).count("= gather[")


def test_narrow_leaves_are_gathered_together():
    batch = mixed()
    assert num_gathers(batch) == 4  # of them, of the image, of the wide leaf and of the halves
    assert num_gathers({name: batch[name] for name in ("float", "integers", "words", "truth", "masks")}) == 1
    assert num_gathers({"wide": batch["wide"]}) == 1
