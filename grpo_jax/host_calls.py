"""Calls of the host by compiled programs, to step simulators that are no JAX programs; async functions on the host."""

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.errors import ConfigError, with_own_frames
from grpo_jax.types import PyTree


class _Block:
    """A block of `host_errors`, and the first error of a call in it."""

    def __init__(self, defer: bool):
        self.defer, self.error = defer, None


_blocks: list[_Block] = []  # the open ones; programs call from other threads


def call_host(function: Callable[..., PyTree], results: PyTree, *arguments: PyTree) -> PyTree:
    """`function(*arguments)` on the host. Under `vmap` all arguments get the same leading axes, and so do the results.

    An error of the function ends the program, unless a block of `host_errors` defers it.

    Args:
      function: pure, of NumPy or JAX arrays: XLA may call it more than once, or not at all.
      results: shapes and dtypes of what it returns, without the axes of `vmap`.
      arguments: arrays, or trees of them.
    """
    rank = jnp.ndim(jax.tree.leaves(arguments)[0])

    def call(*given):
        blocks = list(_blocks)
        deferred = any(block.defer for block in blocks)
        if not (deferred and any(block.error for block in blocks)):  # else nobody will see what it returns
            try:
                return _without_exit(function, given)
            except BaseException as error:
                for block in blocks:
                    block.error = block.error or error
                if not deferred:
                    raise
        first = jax.tree.leaves(given)[0]
        axes = first.shape[: first.ndim - rank]
        return jax.tree.map(lambda leaf: np.zeros((*axes, *leaf.shape), leaf.dtype), results)

    return jax.pure_callback(call, results, *arguments, vmap_method="broadcast_all")


def _without_exit(function: Callable[..., PyTree], arguments: tuple) -> PyTree:
    """Makes an error of `sys.exit`, which would end the program as if it had succeeded."""
    try:
        return function(*arguments)
    except SystemExit as exit:
        raise ConfigError(f"a function on the host called sys.exit({exit.code!r}); let it raise an error") from exit


@contextlib.contextmanager
def host_errors(*, defer: bool = False) -> Iterator[None]:
    """Raises the first error of `call_host`, as it is, in place of JAX's error for the program that made the call.

    Args:
      defer: programs of the block go on, with zeros, until they end; wait for their results inside it. On several
        devices this is necessary: if one of them ended, the others would wait for it.
    """
    block = _Block(defer)
    logger, is_news = logging.getLogger("jax._src.callback"), lambda record: block.error is None
    logger.addFilter(is_news)  # JAX also prints the traceback
    _blocks.append(block)
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # a program that ends at once raises ValueError
        if block.error in (None, error):
            raise
        raise with_own_frames(block.error) from block.error.__cause__
    else:
        if block.error is not None:
            raise with_own_frames(block.error)
    finally:
        _blocks.remove(block)
        logger.removeFilter(is_news)


def finished(program: Callable[..., Any], *arguments: Any, num_devices: int) -> Any:
    """The results of a program, once it has ended on all of its devices; raises the error of a call of the host."""
    with host_errors(defer=num_devices > 1):
        return jax.block_until_ready(program(*arguments))


def run_async(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, run in the one event loop of this process.

    The loop runs in a thread of its own, so that semaphores and connections of a module serve all calls, also where
    the calling thread has a loop, as a notebook's.
    """
    return asyncio.run_coroutine_threadsafe(coroutine, _event_loop()).result()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="grpo_jax async", daemon=True).start()
    return loop
