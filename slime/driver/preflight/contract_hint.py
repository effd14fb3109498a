"""How to try a user's function that has failed in seconds, instead of by starting a run again."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[3] / "tests" / "plugin_contracts"
_LOADED = (
    *("--data-source-path", "--buffer-filter-path", "--dynamic-sampling-filter-path", "--rollout-sample-filter-path"),
    *("--rollout-all-samples-process-path", "--rollout-sample-hook-path", "--custom-rm-path", "--eval-function-path"),
)
_RUNTIME = (
    *("--custom-rollout-log-function-path", "--custom-eval-rollout-log-function-path"),
    *("--custom-reward-post-process-path", "--custom-convert-samples-to-train-data-path"),
    *("--rollout-data-postprocess-path", "--custom-advantage-function-path", "--custom-loss-function-path"),
    *("--custom-tis-function-path", "--custom-pg-loss-reducer-function-path", "--custom-megatron-init-path"),
    *("--custom-model-provider-path", "--custom-megatron-before-log-prob-hook-path"),
    *("--custom-megatron-before-train-step-hook-path", "--custom-update-weight-post-write-path"),
)
_GENERATE = "--custom-generate-function-path"
CONTRACTS = {
    _GENERATE: "test_plugin_generate_contracts.py",
    **dict.fromkeys(_LOADED, "test_plugin_path_loading_contracts.py"),
    "--rollout-function-path": "test_plugin_rollout_contracts.py",
    **dict.fromkeys(_RUNTIME, "test_plugin_runtime_hook_contracts.py"),
}
"""The contract check of each function, by its flag."""
_NAMED = re.compile(r"(--[a-z-]+-path) (\S*[^\s:,;])")


def contract_hint(args: argparse.Namespace, message: str) -> str:
    """A line with the command that checks the first of the user's functions that an error names, or nothing.

    A reward may read what a generate function wrote, so that this is called in its check, too.
    """
    for flag, path in _NAMED.findall(message):
        if flag not in CONTRACTS or not re.search(r"[.:]\w", path) or path.startswith("slime."):
            continue
        words = [flag, path]
        generate = getattr(args, "custom_generate_function_path", None)
        if flag == "--custom-rm-path" and generate is not None:
            words += [_GENERATE, generate]
        program = _FOLDER / CONTRACTS[flag]
        if program.is_file():
            return f"\ntest this function in seconds: {shlex.join(['python3', os.path.relpath(program), *words])}"
    return ""
