"""Addresses of the models that a run serves, for hooks."""

from __future__ import annotations

from argparse import Namespace

from slime.utils.http_utils import http_url

ACTOR, REWARD = "actor", "reward"
"""The trained model, and the one of ``--rm-model-path``."""


def get_model_url(args: Namespace, model_name: str = ACTOR, endpoint: str = "/generate") -> str:
    """Where ``endpoint``, a path of SGLang's that the router forwards, of a model of the run answers: ``actor`` (or
    ``default``), the trained one, or ``reward``, that of ``--rm-model-path``; ValueError where it is not served.
    `http_utils.post` adds the key that its router wants."""
    routers = dict(getattr(args, "sglang_model_routers", {}))
    if args.sglang_router_ip and ACTOR not in routers:
        routers[ACTOR] = args.sglang_router_ip, args.sglang_router_port
    name = ACTOR if model_name == "default" and model_name not in routers else model_name
    if name not in routers:
        served = ", ".join(routers) or "none yet"
        hint = "; --rm-model-path and --rm-num-gpus serve one" if name == REWARD else ""
        raise ValueError(f"get_model_url: there is no model {model_name!r}, served are: {served}{hint}")
    host, port = routers[name]
    return http_url(host, int(port)) + endpoint
