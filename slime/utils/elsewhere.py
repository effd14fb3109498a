"""Where to find here what a function that was written for the upstream system imports or asks for."""

from __future__ import annotations

import contextlib
import re
from types import ModuleType

_BY_RM_TYPE = "await slime.rollout.rm_hub.async_rm(args, sample) grades by --rm-type"
_GENERATE_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout, whose flags are in docs/rollout.md, does all of it"
_EVALUATION = "generate_rollout(args, rollout_id, data_source, evaluation=True) scores all of args.eval_datasets"
_HTTP = "slime.utils.http_utils.post and get open and close their client themselves"
_ENGINES = "slime.rollout.sglang_rollout.get_model_url says where the router answers"
_PORTS = "bind port 0 of a socket, and ask it for its number"
_ELSEWHERE = {
    "slime.agent.adapters.anthropic": "slime.agent.adapters has AnthropicAdapter",
    "slime.agent.adapters.common": "slime.agent.adapters has BaseAdapter, slime.agent.trajectory TurnRecord",
    "slime.agent.adapters.openai": "slime.agent.adapters has OpenAIAdapter",
    "slime.backends.megatron_utils": "a custom loss is given what it needs, see docs/algorithms.md",
    "slime.observability.trace_viewer": "python3 tools/make_trace.py makes a file for Perfetto, see docs/traces.md",
    "slime.options.schema": "slime.options.flags.schema has it",
    "slime.rollout.base_types.call_rollout_fn": "call the function; --rollout-function-path may name it",
    "slime.rollout.filter_hub.base_types.call_dynamic_filter": (
        "call the filter; it gives a bool or a DynamicFilterOutput"
    ),
    "slime.rollout.filter_hub.base_types.MetricGatherer": (
        "a rollout function returns its own metrics in RolloutFnTrainOutput"
    ),
    "slime.rollout.filter_hub.base_types.should_drop_dynamic_filter_output": "read its keep and keep_when_insufficient",
    "slime.rollout.engine.generation.GenerateState.pendings": _GENERATE_ROLLOUT,
    "slime.rollout.engine.generation.GenerateState.processor": "images are not available yet in this version",
    "slime.rollout.engine.generation.GenerateState.remaining_batch_size": _GENERATE_ROLLOUT,
    "slime.rollout.engine.generation.GenerateState.reset": _GENERATE_ROLLOUT,
    "slime.rollout.engine.generation.GenerateState.semaphore": (
        "slime's generate and http_utils.post wait for their place by themselves (--sglang-server-concurrency)"
    ),
    "slime.rollout.engine.generation.GenerateState.submit_generate_tasks": _GENERATE_ROLLOUT,
    "slime.rollout.rm_hub.deepscaler": _BY_RM_TYPE,
    "slime.rollout.rm_hub.f1": _BY_RM_TYPE,
    "slime.rollout.rm_hub.gpqa": _BY_RM_TYPE,
    "slime.rollout.reward.graders": "slime.grading.graders has them",
    "slime.rollout.rm_hub.graders": "slime.grading.graders has them",
    "slime.rollout.sample_hooks": "write a hook of your own for --rollout-sample-hook-path, see docs/customize.md",
    "slime.rollout.sglang_rollout.abort": _GENERATE_ROLLOUT,
    "slime.rollout.sglang_rollout.eval_rollout": _EVALUATION,
    "slime.rollout.sglang_rollout.eval_rollout_single_dataset": _EVALUATION,
    "slime.rollout.sglang_rollout.generate_rollout_async": _GENERATE_ROLLOUT,
    "slime.rollout.sglang_streaming_rollout": "slime.rollout.sglang_rollout.generate keeps what an abort interrupts",
    "slime.rollout.sleep_rollout": "engines stay up without it",
    "slime.utils.async_utils": "a plain function may call asyncio.run, most hooks may be async",
    "slime.utils.data": "slime.data.rows.dataset reads prompts, see docs/rollout.md for data sources of your own",
    "slime.utils.eval_config": "args.eval_datasets has slime.options.eval_datasets.EvalDataset",
    "slime.utils.http_utils.find_available_port": _PORTS,
    "slime.utils.http_utils.get_host_info": "slime.utils.http_utils.host_ip has the address of this host",
    "slime.utils.http_utils.get_rollout_num_engines": _ENGINES,
    "slime.utils.http_utils.init_http_client": _HTTP,
    "slime.utils.http_utils.is_port_available": _PORTS,
    "slime.utils.installation": "slime.entry.installation has it",
    "slime.utils.mask_utils": "slime.data.rows.conversation.ConversationEncoder makes masks of conversations",
    "slime.utils.misc.Box": "keep the value itself: nothing here wraps references of Ray's",
    "slime.utils.misc.SingletonMeta": "functools.cache on a function that makes the object gives one a process",
    "slime.utils.misc.decode_int32_meta_array": "numpy.frombuffer(base64.b64decode(text), dtype=numpy.int32)",
    "slime.utils.misc.get_current_node_ip": "slime.utils.http_utils.host_ip has the address of this host",
    "slime.utils.misc.get_free_port": _PORTS,
    "slime.utils.misc.group_by": "itertools.groupby over what is sorted by the same key",
    "slime.utils.misc.should_run_periodic_action": "compare (rollout_id + 1) % interval with 0",
    "slime.utils.ppo_utils": "slime.algorithms has the losses",
    "slime.utils.processing_utils": "slime.rollout.tokenizer has load_tokenizer",
    "slime.utils.storage": "slime.files.storage has it",
    "slime.utils.timer": "perf/ in metrics.jsonl has the times of a run's parts, see docs/metrics.md",
    "slime.utils.trace_utils": "slime.observability.trace_utils has it",
    "slime.utils.types.MultimodalTypes": "images are not available yet in this version",
    "slime.utils.types.ParamInfo": "slime.models maps parameters to Hugging Face names, see docs/add_a_model.md",
    "slime_plugins": "write a custom generate function, see docs/customize.md",
}
"""Modules and names that users' functions import, of the upstream system or of earlier versions, and what to use."""
_NAME_MISSING = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")


def told(error: BaseException) -> str:
    """What a user's code raised, in words: the error's kind and message, and where to find here what it lacks."""
    try:
        message = str(error)
    except Exception:  # its own __str__
        message = "its message cannot be read"
    return f"{type(error).__name__}: {message}{elsewhere(error)}"


def elsewhere(error: BaseException) -> str:
    """To follow an error of a user's code: where to find what was written for the upstream system; else nothing. It
    knows modules that are missing, names that are missing in one, and attributes of modules and objects."""
    with contextlib.suppress(Exception):  # of objects that cannot be asked: a hint never takes an error's place
        return hint_for(_missing(error))
    return ""


def hint_for(missing: str) -> str:
    """What to use for a dotted name of upstream's, to follow a message; empty for any other."""
    found = (text for name, text in _ELSEWHERE.items() if missing == name or missing.startswith(f"{name}."))
    return "".join(f"; {text}" for text in found)


def _missing(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return error.name or ""
    if isinstance(error, ImportError):
        named = _NAME_MISSING.search(str(error))
        return f"{named[2]}.{named[1]}" if named else ""
    if isinstance(error, AttributeError) and error.obj is not None:
        if isinstance(error.obj, ModuleType):
            return f"{error.obj.__name__}.{error.name}"
        kinds = (f"{kind.__module__}.{kind.__qualname__}.{error.name}" for kind in type(error.obj).__mro__)
        return next((name for name in kinds if name in _ELSEWHERE), "")
    return ""
