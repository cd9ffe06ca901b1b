"""GRPO and PPO as pure functions in JAX; `__init__.pyi` lists the public names, each imported at its first use."""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
