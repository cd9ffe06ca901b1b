"""The policy in NumPy alone: `from policy import act`, then `action = act(observation)`.

It reads `manifest.json` and `policy.npz` beside it.
"""

import functools
import json
from pathlib import Path

import numpy as np

ACTIVATIONS = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x * (1 + np.tanh(x / 2)) / 2,
    "gelu": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
}
ACTIVATIONS["swish"] = ACTIVATIONS["silu"]


def act(observation, rng=None, *, action_mask=None):
    """The action for an observation, or the actions for a batch of them, as the environment gives and takes them.

    Args:
      observation: one, or a batch, with one more axis, the first.
      rng: a `numpy.random.Generator`, which samples; None takes the most probable action.
      action_mask: bool `[num_actions]` or `[N, num_actions]`, the legal actions, where the environment has masks.
    """
    manifest, arrays = files()
    actions, first = manifest["actions"], np.array(manifest["actions"]["first"], manifest["actions"]["dtype"])
    if manifest["has_action_masks"] and (action_mask is None or not np.any(action_mask, axis=-1).all()):
        raise ValueError("write act(observation, action_mask=mask), where True is a legal action, and at least one is")
    x, is_single = features(observation)
    outputs = network(x)
    if "middle" in actions:  # real numbers
        if rng is not None:
            outputs = outputs + np.exp(np.clip(arrays["params/free"], -5, 2)) * rng.normal(size=outputs.shape)
        middle, scale, low, high = (np.array(actions[name], np.float32) for name in ("middle", "scale", "low", "high"))
        chosen = np.clip(middle + scale * outputs, low, high)
    else:
        logits = outputs if action_mask is None else np.where(action_mask, outputs, -np.inf)
        logits = logits if rng is None else logits + rng.gumbel(size=logits.shape)
        parts = np.split(logits, np.cumsum(actions["num_actions"])[:-1], axis=-1)
        chosen = np.stack([np.argmax(part, axis=-1) for part in parts], axis=-1)
    chosen = first + chosen.reshape(len(x), *first.shape).astype(first.dtype)
    return chosen[0] if is_single else chosen


def features(observation):
    """The observation as the network sees it, `[N, features]`, and whether it is one, not a batch."""
    manifest, arrays = files()
    seen = []
    for path, leaf in manifest["observation"].items():
        x, shape = observation, tuple(leaf["shape"])
        for key in leaf["keys"]:
            x = getattr(x, key) if hasattr(x, "_fields") else x[key if isinstance(x, dict) else int(key)]
        is_single = np.shape(x) == shape
        x = np.asarray([x] if is_single else x)
        if x.shape[1:] != shape:
            raise ValueError(f"the observation {path} has the shape {shape}, or one axis more, not {x.shape}")
        if leaf["num_values"]:  # an integer, which becomes one-hot
            x = x.reshape(len(x), -1, 1) - leaf["start"] == np.arange(leaf["num_values"])
        x, statistics = x.reshape(len(x), -1).astype(np.float32), f"normalizer/observation/{path}".rstrip("/")
        if f"{statistics}/mean" in arrays:
            names = "origin", "mean", "variance"
            origin, mean, variance = (arrays[f"{statistics}/{name}"].reshape(-1) for name in names)
            x = np.clip((x - origin - mean) / np.sqrt(variance + 1e-8), -10, 10)
        seen.append(x)
    return np.concatenate(seen, axis=-1), is_single


def network(x):
    """The logits, or the mean of a Gaussian, `[N, outputs]`."""
    fields, arrays = files()[0]["network"], files()[1]
    name, num_layers = "params/actor_critic" if fields["shared_critic"] else "params/actor", len(fields["hidden_sizes"])
    for i in range(num_layers + 1):
        x = x @ arrays[f"{name}/Dense_{i}/kernel"] + arrays[f"{name}/Dense_{i}/bias"]
        if i == num_layers:
            return x
        if fields["layer_norm"]:
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
            x = x * arrays[f"{name}/LayerNorm_{i}/scale"] + arrays[f"{name}/LayerNorm_{i}/bias"]
        x = ACTIVATIONS[fields["activation"]](x)


@functools.cache
def files():
    """What manifest.json says, and the arrays of policy.npz."""
    folder = Path(__file__).parent
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8")), dict(np.load(folder / "policy.npz"))
