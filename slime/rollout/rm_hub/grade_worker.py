"""A process that compares answers by algebra: JSON lines in, JSON lines out, until standard input ends.

A process of its own, because symbolic algebra can run for hours or eat all memory, and can then only be killed.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import sys

_MEMORY = 4 << 30
_PR_SET_PDEATHSIG = 1


def equal(answer: str, label: str) -> bool:
    """Whether two LaTeX expressions have the same value, by math-verify; without its own time limits."""
    from math_verify import parse, verify

    gold, guess = (parse(f"${text}$", parsing_timeout=None) for text in (label, answer))
    return bool(gold) and bool(guess) and bool(verify(gold, guess, timeout_seconds=None))


def main() -> None:
    """Answer requests ``{"answer", "label"}`` with true or false."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    # What a library prints must not end up among the replies.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # It warns that its own time limits are off: ours ends the process.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    equal("1/2", "0.5")
    replies.write("ready\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            verdict = equal(request["answer"], request["label"])
        except (Exception, MemoryError, RecursionError):
            verdict = False  # an answer that cannot be parsed is not the right one
        replies.write(json.dumps(verdict) + "\n")


if __name__ == "__main__":
    main()
