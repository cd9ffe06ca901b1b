"""Training times that others published, with the shapes that they were measured at."""

from typing import NamedTuple

from .reference_implementations import Size

ALL = ("rejax PPO", "plain PPO", "PPO", "GRPO")
OURS = ("PPO", "GRPO")


class Published(NamedTuple):
    seconds: float  # of the whole training of all seeds
    hardware: str
    source: str
    note: str = ""


class Shape(NamedTuple):
    """A training that somebody timed: what each train step does, and how many environment steps there are."""

    title: str
    environment: str
    size: Size
    total_steps: int  # of each seed
    published: dict[int, Published | None]  # by the number of seeds that train at once
    implementations: tuple[str, ...] = ALL


def _pgx(game: str, compiling: int, training: int) -> Shape:
    note = f"{compiling} s of them to compile; a convolution, and evaluations"
    published = Published(training, "a GPU, not named", "pgx examples/minatar-ppo", note)
    size = Size(4096, num_epochs=3, num_minibatches=128)
    return Shape(f"pgx: {game}", f"{game}-MinAtar", size, 20_000_000, {1: published})


_CARTPOLE = "purejaxrl docs/cartpole_plot_parallel.png"
_BREAKOUT = "rejax img/speedup_minatar.png"

SHAPES = {
    "purejaxrl-cartpole": Shape(
        "purejaxrl: CartPole",
        "CartPole-v1",
        Size(4),
        500_000,
        {
            1: Published(26, "A100", _CARTPOLE, "24 to 28, with compiling"),
            64: None,
            512: None,
            2048: Published(98, "A100", _CARTPOLE, "with compiling"),
        },
    ),
    "rejax-breakout": Shape(
        "rejax: Breakout",
        "Breakout-MinAtar",
        Size(32, num_steps=32),
        1_000_000,
        {1: Published(10.5, "A100 80G", _BREAKOUT), 300: Published(60, "A100 80G", _BREAKOUT)},
    ),
    "pgx-breakout": _pgx("Breakout", 12, 30),
    "pgx-freeway": _pgx("Freeway", 13, 35),
    "pgx-asterix": _pgx("Asterix", 13, 38),
    "pgx-space-invaders": _pgx("SpaceInvaders", 12, 37),
    "pgx-seaquest": _pgx("Seaquest", 21, 75),
    "navix-empty": Shape(
        "Navix: Empty-5x5",
        "navix:Navix-Empty-5x5-v0",
        Size(16, num_epochs=1, num_minibatches=8),
        1_000_000,
        {2048: Published(53, "A100 80G", "Navix README", "49 to 57.5")},
        OURS,
    ),
    "one-layer": Shape(
        "PufferLib 5's shape, on CartPole",
        "CartPole-v1",
        Size(8192, num_steps=32, num_epochs=3, hidden_sizes=(64,)),
        100_000_000,
        {1: Published(7.8, "RTX 5090", "PufferLib FAST_CUDA.md", "another environment, played on 32 threads")},
    ),
    "craftax-symbolic": Shape(
        "Craftax-Symbolic",
        "craftax:Craftax-Symbolic-v1",
        Size(1024, num_steps=64, num_minibatches=8, hidden_sizes=(512, 512)),
        100_000_000,
        {1: None},
        OURS,
    ),
    "large-cartpole": Shape("65,536 environments", "CartPole-v1", Size(65536), 1_000_000_000, {1: None}),
}
