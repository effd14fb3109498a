"""A bound on the sandboxes that are open at a time, boots that are tried again, and an end for each of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from slime.agent.sandbox.protocol import Sandbox, SandboxError

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=Sandbox)
_CLOSE_S = 60.0
_FIRST_PAUSE_S = 1.0


class SandboxPool(Generic[S]):
    """``async with SandboxPool(make, limit=16) as pool: async with pool.sandbox(image) as sb: ...``

    Args:
        make: gives a sandbox that is not open yet, of the arguments of `sandbox`.
        limit: how many are open at a time, those that boot and those that close included.
        boot_retries: how often a boot that failed is tried again, each time a new sandbox.
        boot_timeout_s: how long one boot may take.
    """

    def __init__(
        self, make: Callable[..., S], limit: int, boot_retries: int = 2, boot_timeout_s: float = 300.0
    ) -> None:
        if limit < 1 or boot_retries < 0:
            raise ValueError(f"a pool of {limit} sandboxes with {boot_retries} retries of boot: at least 1 and 0")
        self._make = make
        self._boot_retries = boot_retries
        self._boot_timeout_s = boot_timeout_s
        self._places = asyncio.Semaphore(limit)
        self._open: set[S] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @contextlib.asynccontextmanager
    async def sandbox(self, *args: Any, **kwargs: Any) -> AsyncIterator[S]:
        """An open sandbox; when the block ends, however it does, it is closed.

        Raises:
            SandboxError: no boot succeeded, or the pool was closed.
        """
        async with self._places:
            opened = await self._boot(args, kwargs)
            try:
                yield opened
            finally:
                await self._end(opened)

    async def close(self) -> None:
        """Close those that are open, whoever has them; no further one can be had."""
        self._closed = True
        await asyncio.gather(*map(self._end, list(self._open)))

    async def _boot(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> S:
        tries = self._boot_retries + 1
        for number in range(tries):
            if self._closed:
                raise SandboxError("the pool of sandboxes was closed")
            sandbox = self._make(*args, **kwargs)
            self._open.add(sandbox)
            try:
                async with asyncio.timeout(self._boot_timeout_s):
                    return await sandbox.__aenter__()
            except BaseException as error:
                # A service may have made it before it failed, or before we were cancelled.
                await self._end(sandbox)
                if not isinstance(error, Exception):
                    raise
                why = str(error) or f"not within {self._boot_timeout_s:g} s"
                if number + 1 == tries:
                    raise SandboxError(f"no sandbox after {tries} boots: {why}") from error
                logger.warning("boot %d of %d of a sandbox failed: %s", number + 1, tries, why)
            await asyncio.sleep(_FIRST_PAUSE_S * 2**number)
        raise AssertionError("unreachable")

    async def _end(self, sandbox: S) -> None:
        """Close it, however often this call is cancelled; what fails is told and ends no run."""
        if sandbox not in self._open:
            return
        self._open.discard(sandbox)
        closing = asyncio.ensure_future(self._close(sandbox))
        cancelled: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    @staticmethod
    async def _close(sandbox: S) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await sandbox.__aexit__(None, None, None)
        except Exception as error:  # of whatever package it is made with
            why = str(error) or f"not within {_CLOSE_S:g} s"
            logger.warning("sandbox %s could not be closed: %s", getattr(sandbox, "sandbox_id", "?"), why)
