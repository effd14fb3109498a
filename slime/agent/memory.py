"""The token memory of one session: what a client writes as messages, as the tokens that it has been to the model."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.agent.messages import Chain, Chainer
from slime.agent.rendering import TurnRenderer
from slime.agent.trajectory import MessageNode, Trajectory, TurnRecord
from slime.data.rows.messages import Messages

logger = logging.getLogger(__name__)

_PATHS = 8
"""Of which a session's memory has the prompts at hand: those of other turns are put together of the path's parts."""
_MANY_PATHS = 32
"""From which on one more is warned of."""


@functools.lru_cache(maxsize=1)
def _warn_of_paths() -> None:
    """Say once that a client makes each turn a path."""
    logger.warning(
        "a session has begun %d paths, and now one more in a conversation that has turns of the model, none of them "
        "known: its client changes what was said before, such as the time of day in a first message. Each of its turns "
        "is kept and trained with the whole conversation, in memory and time that grow with the square of the turns: "
        "have the client leave what was said as it was, or bound its turns (--agent-max-turns)",
        _MANY_PATHS,
    )


@dataclass(frozen=True)
class Prompt:
    """One to be answered.

    Attributes:
        ids: all its tokens.
        parent: the turn that it goes on from; None of one that begins a path.
        chain: the conversation's keys.
    """

    ids: list[int]
    parent: MessageNode | None
    chain: Chain


@dataclass
class Counters:
    """What became of a session's turns.

    Attributes:
        turns: that were recorded.
        forks: of these, the ones that began a path of their own though the conversation was known to have turns.
        rendered_again: tokens that the model had made, and that a fork's prompt has anew, as text that was read back.
        render_seconds: that templates and tokenizer took.
        rendered_tokens: that they made.
        prompt_tokens: that requests to engines had, as these report it.
        cached_tokens: of these, the ones of which they had keys and values.
    """

    turns: int = 0
    forks: int = 0
    rendered_again: int = 0
    render_seconds: float = 0.0
    rendered_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class TokenMemory:
    """Prompts of a session, and the turns that answer them."""

    renderer: TurnRenderer
    trajectory: Trajectory = field(default_factory=Trajectory)
    counters: Counters = field(default_factory=Counters)
    _chainer: Chainer = field(default_factory=Chainer)
    _prompts: dict[MessageNode | None, list[int]] = field(default_factory=dict)
    """Of the turns that are likely to be gone on from: the last ones of the latest paths."""

    def prompt(self, messages: Messages, tools: Any = None) -> Prompt:
        """The tokens of a conversation: of what is known of it those that the engine has had, and only what was said
        since is rendered. RowError where the chat template refuses it."""
        began, chain = time.perf_counter(), self._chainer.chain(messages, tools)
        ids, parent, new = self._known(messages, tools, chain) or self._whole(messages, tools)
        self.counters.render_seconds += time.perf_counter() - began
        self.counters.rendered_tokens += new
        return Prompt(ids, parent, chain)

    def _known(self, messages: Messages, tools: Any, chain: Chain) -> tuple[list[int], MessageNode, int] | None:
        found = self.trajectory.find(chain)
        if found is None or found[1] == len(messages):
            return None
        node, end = found
        behind = self.renderer.next(node.reply.get("tool_calls"), messages[end:], node.turn.output_ids, tools)
        if behind is None:
            return None
        before = self._prompts.get(node) or node.before().tolist()
        return [*before, *node.turn.output_ids, *behind], node, len(behind)

    def _whole(self, messages: Messages, tools: Any) -> tuple[list[int], MessageNode | None, int]:
        ids = self.renderer.first(messages, tools)
        # A template that cannot be cut may still give what was there before, and more.
        return ids, self.trajectory.find_by_ids(ids), len(ids)

    def record(
        self, prompt: Prompt, turn: TurnRecord, reply: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
    ) -> MessageNode:
        """Add the turn that answered a prompt by the message ``reply``."""
        self.counters.turns += 1
        self.counters.prompt_tokens += int(turn.meta_info.get("prompt_tokens") or 0)
        self.counters.cached_tokens += int(turn.meta_info.get("cached_tokens") or 0)
        found = self.trajectory.find(prompt.chain)
        if found is not None and prompt.parent is None:
            self.counters.forks += 1
            self.counters.rendered_again += sum(len(node.output) for node in found[0].path)
        elif found is not None and found[0] is prompt.parent and found[1] < prompt.chain.answered[0][0]:
            self.counters.forks += 1  # what the model said since was not known again
        if prompt.parent is None and prompt.chain.answered and len(self.trajectory.roots) >= _MANY_PATHS:
            _warn_of_paths()
        key = prompt.chain.with_reply(reply)
        node = self.trajectory.add(turn, prompt.parent, key=key, reply=reply, metadata=metadata)
        self._prompts.pop(prompt.parent, None)
        self._prompts[node] = prompt.ids
        if len(self._prompts) > _PATHS:
            del self._prompts[next(iter(self._prompts))]
        return node
