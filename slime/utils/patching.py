"""Patches to released packages, as records: what each does, for which releases, and what becomes of it in others.

A backend's ``patches.py`` has the tables. Nothing but `apply` and `within` carries a record out, and they look at the
installed version first: over newer code a patch would quietly undo it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from slime.utils.errors import BadInputError

logger = logging.getLogger(__name__)

ALLOW_FLAG = "--allow-untested-versions"
ALLOW_VARIABLE = "SLIME_ALLOW_UNTESTED_VERSIONS"
"""How the flag reaches every process of a run, and programs that have no such flag: 1 is yes."""

OR = " || "
"""Between the specifiers of releases that a patch is for: PEP 440 has no word for it."""
Facts = TypeVar("Facts")
"""What decides which of a table's patches a process needs."""
_told: set[str] = set()
"""Names of patches of whose omission this process has told."""


@functools.cache  # a package's whole description is read for it, 5 ms each, and a dry run asks a hundred times
def version_of(package: str) -> str | None:
    """A package's version in this environment, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class UntestedVersionError(BadInputError):
    """A patch is wanted, and the installed release is none of those that it was made for."""


@dataclass(frozen=True)
class Patch(Generic[Facts]):
    """One change, from outside, to a package that is installed as it was released."""

    name: str
    """Short, and no other's."""
    package: str
    """The distribution whose releases decide whether the patch is needed."""
    versions: str
    """PEP 440 specifiers with `OR` between them: the releases on which the patch was seen to be needed, and to work."""
    where: str
    """Which processes, on which hosts."""
    goes: str
    """When it can go."""
    apply: Callable[..., Any]
    """Carries it out; of one that lasts only for a block, it returns a context manager (see `within`)."""
    wanted: Callable[[Facts], bool] = lambda _: True
    gone: str = ""
    """As ``versions``: the releases that were seen to need it no more. It is left out there, and nothing told."""

    @property
    def what(self) -> str:
        """What it does: how the docstring of ``apply`` begins."""
        return " ".join((inspect.getdoc(self.apply) or "").partition("\n\n")[0].split())

    def installed(self) -> str | None:
        """The package's version in this environment, or None."""
        return version_of(self.package)

    def is_tested(self) -> bool:
        """Whether the installed release is one of ``versions``; builds of it (2.11.0+cu129) count as the release."""
        return _is_one_of(self.installed(), self.versions)

    def is_gone(self) -> bool:
        """Whether the installed release is one of ``gone``."""
        return bool(self.gone) and _is_one_of(self.installed(), self.gone)


def due(
    patches: Iterable[Patch[Facts]], facts: Facts, warn: Callable[[str], None] = logger.warning
) -> Iterator[Patch[Facts]]:
    """The patches that a process with these facts carries out.

    Where untested versions are allowed, those of other releases are left out, and ``warn`` told of each once a process;
    otherwise an UntestedVersionError says that an installed release is none of those that a wanted patch was made for.
    """
    for patch in patches:
        if not patch.wanted(facts) or patch.is_gone():
            continue
        if patch.is_tested():
            yield patch
            continue
        if os.environ.get(ALLOW_VARIABLE) != "1":
            raise UntestedVersionError(
                f"{_untested(patch)}: install {patch.package}{told(patch.versions)}, "
                f"or do without the patch by {ALLOW_FLAG} ({ALLOW_VARIABLE}=1 for programs without that flag)"
            )
        if patch.name not in _told:
            _told.add(patch.name)
            warn(f"{_untested(patch)}: it is left out, as {ALLOW_FLAG} says")


def told(releases: str) -> str:
    """Releases that a patch is for, as people read them."""
    return releases.replace(OR, " or ")


def apply(patches: Iterable[Patch[Facts]], facts: Facts) -> None:
    """Carry out, in their order, those of these patches that a process with these facts needs; raises as `due` does."""
    for patch in due(patches, facts):
        patch.apply()


@contextlib.contextmanager
def within(patch: Patch[Facts], facts: Facts) -> Iterator[None]:
    """Within the block, a patch is in force if a process with these facts needs it; raises as `due` does."""
    with contextlib.ExitStack() as stack:
        for needed in due([patch], facts):
            stack.enter_context(needed.apply())
        yield


@contextlib.contextmanager
def hidden(*modules: str) -> Iterator[None]:
    """Within the block, to import one of these modules is an ImportError, whether it is installed or not."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(dict.fromkeys(before))  # type: ignore[arg-type]  # None: importing it fails
    try:
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def allow_untested_versions() -> None:
    """Have this process, and those that get its environment, do without the patches for other releases."""
    os.environ[ALLOW_VARIABLE] = "1"


def _is_one_of(version: str | None, releases: str) -> bool:
    from packaging.specifiers import SpecifierSet  # the site is built of these records' modules without it

    return version is not None and any(
        SpecifierSet(release).contains(version, prereleases=True) for release in releases.split(OR)
    )


def _untested(patch: Patch[Any]) -> str:
    version = patch.installed()
    found = f"{patch.package} {version} is installed" if version else f"no version of {patch.package} is known"
    return f"{found}, and the patch {patch.name} (docs/patches.md) is for {told(patch.versions)}"
