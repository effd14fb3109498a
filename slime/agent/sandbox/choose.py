"""A sandbox by the name of its kind, as options and the environment give it."""

from __future__ import annotations

from slime.agent.sandbox.daytona import DaytonaSandbox
from slime.agent.sandbox.docker import DockerSandbox
from slime.agent.sandbox.e2b import E2BSandbox
from slime.agent.sandbox.local import LocalSandbox, SandboxLimits
from slime.agent.sandbox.modal import ModalSandbox
from slime.agent.sandbox.protocol import Sandbox, SandboxError, setting
from slime.agent.sandbox.service import ServiceSandbox
from slime.utils.misc import load_function

_SERVICES: dict[str, type[ServiceSandbox]] = {
    each.kind: each for each in (DockerSandbox, E2BSandbox, DaytonaSandbox, ModalSandbox)
}


def make_sandbox(
    image: str = "", *, kind: str = "", reach: str | None = None, limits: SandboxLimits | None = None
) -> Sandbox:
    """A sandbox that is not open yet.

    Args:
        image: what it is made from; a local one is made from this host's programs and takes none.
        kind: ``local`` (a jail), ``plain`` (processes without one), ``docker``, ``e2b``, ``daytona`` or ``modal``, or
            the path of a class or function of yours, ``pkg.module.Name``, that is given the image; empty is
            SLIME_AGENT_SANDBOX, or ``local``.
        reach: the one address that a local one can connect to, the gateway.
        limits: of a local one; services have their own.

    Raises:
        SandboxError: the kind is unknown, or has no image.
        BadInputError: there is nothing at the path.
    """
    kind = kind or setting("SLIME_AGENT_SANDBOX", "SLIME_AGENT_SANDBOX_BACKEND", default="local")
    if "." in kind:
        made: Sandbox = load_function(kind, flag="SLIME_AGENT_SANDBOX")(image)
        return made
    if kind in ("local", "plain"):
        return LocalSandbox(limits, reach=reach, jail=kind == "local")
    if kind not in _SERVICES:
        names = ", ".join(["local", "plain", *_SERVICES])
        raise SandboxError(f"SLIME_AGENT_SANDBOX={kind} must be one of {names}, or the path of a class of yours")
    if not image:
        raise SandboxError(f"a sandbox of {kind} needs an image")
    return _SERVICES[kind](image)
