"""The packages of the wheel; all else is in pyproject.toml."""

from setuptools import find_packages, setup

commands = [f"grpo_jax.{name}" for name in find_packages(include=["experiments", "experiments.*"])]
setup(
    py_modules=["grpo_jax_cli"],
    packages=[*find_packages(include=["grpo_jax", "grpo_jax.*"]), *commands],
    # Inside the package, the name of the commands cannot clash with another project's experiments.
    package_dir={"grpo_jax.experiments": "experiments"},
)
