"""The agent of the training side: it lets the hub's server (`server.py`, at HUB_URL) play, and brings its reward.
HUB_KEY is what opens that server.

--custom-generate-function-path slime.agent.rollout.generate
--custom-agent-function-path examples.environment_hubs.agent.run
"""

from __future__ import annotations

import os
from typing import Any

from slime.utils.http_utils import post


async def run(base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """One episode; its turns are the session's at ``base_url``. The server needs not be told of an episode that is
    given up: its session is closed, and the next turn ends it.

    Raises:
        RequestError: there is no server, or the environment failed; its words are in the message.
    """
    asked = {"base_url": base_url, "prompt": prompt, "request_kwargs": request_kwargs, "metadata": metadata}
    url = os.environ.get("HUB_URL", "http://127.0.0.1:8770/run")
    key = {"Authorization": f"Bearer {os.environ.get('HUB_KEY', '')}"}
    played = await post(url, asked, max_retries=0, headers=key, timeout=request_kwargs["timeout"])
    return {"reward": float(played["reward"]), "metadata": played.get("metadata") or {}}
