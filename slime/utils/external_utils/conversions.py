"""Checkpoints made of a model by the programs in tools/: once, and taken for there only when they are whole."""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from pathlib import Path

from slime.utils.errors import BadInputError
from slime.utils.external_utils.downloads import missing_of, models_dir, one_at_a_time
from slime.utils.external_utils.own_ray import REPOSITORY, this_node
from slime.utils.misc import exec_command

_PORT = 23456
"""At which the nodes of a conversion meet."""


def convert_checkpoint(
    model_name: str,
    megatron_model_type: str | None,
    num_gpus_per_node: int,
    multinode: bool = False,
    extra_args: str = "",
    dir_dst: str | None = None,
    hf_checkpoint: str | None = None,
) -> str:
    """Have a torch_dist checkpoint of a model in ``DIR_DST/MODEL_NAME_torch_dist``, for ``--ref-load``; one that is
    whole is kept.

    ``num_gpus_per_node`` processes convert, which use no GPU; if ``multinode``, on each of several nodes, which share
    ``dir_dst``. That is by default `models_dir` where SLIME_MODELS_DIR is set, else /root, and ``hf_checkpoint`` the
    model in `models_dir`. ``megatron_model_type`` is as of `execute_train`; ``extra_args`` are further flags of
    tools/convert_hf_to_torch_dist.py. CommandError where it failed; nothing half-written is left in its place.
    """
    below = dir_dst or (models_dir() if os.environ.get("SLIME_MODELS_DIR") else "/root")
    target = Path(below, f"{model_name}_torch_dist").absolute()
    words = [str(REPOSITORY / "tools" / "convert_hf_to_torch_dist.py")]
    shape = ""
    if megatron_model_type is not None:
        shape = f"source {shlex.quote(str(model_script(megatron_model_type)))} && "
        words.append('"${MODEL_ARGS[@]}"')
    words += ["--hf-checkpoint", shlex.quote(hf_checkpoint or f"{models_dir()}/{model_name}")]
    # What is there and is not a whole checkpoint is replaced, if an earlier conversion wrote it, and refused otherwise.
    words += ["--save", shlex.quote(str(target)), "--force", extra_args]
    meeting = ["--standalone"]
    if multinode:
        node = this_node()
        meeting = ["--master-addr", shlex.quote(node.head), "--master-port", str(_PORT)]
        meeting += ["--nnodes", str(node.count), "--node-rank", str(node.rank)]
    ranks = ["--nproc-per-node", str(num_gpus_per_node), *meeting]
    torchrun = [shlex.quote(sys.executable), "-m", "torch.distributed.run", *ranks]
    path = f"PYTHONPATH={shlex.quote(str(REPOSITORY))}${{PYTHONPATH:+:$PYTHONPATH}}"
    command = f"{shape}{path} {' '.join([*torchrun, *words]).rstrip()}"
    if _is_converted(target):
        print(f"convert_checkpoint: {target} is there", flush=True)
    elif multinode:  # its nodes wait for each other
        exec_command(command)
    else:
        with one_at_a_time(target):
            if not _is_converted(target):
                exec_command(command)
    return str(target)


def _is_converted(target: Path) -> bool:
    """Whether there is a whole checkpoint, of which the file that names it is written last."""
    from slime.files.checkpoints import find_checkpoint, is_torch_dist

    try:
        found = find_checkpoint(target)
    except (FileNotFoundError, ValueError):
        return False
    return found is not None and is_torch_dist(found[0])


def fp8_cast_bf16(path_src: str, path_dst: str) -> None:
    """Have a bfloat16 copy of a float8 model at ``path_dst``, which is whole or absent; CommandError if that fails."""
    target = Path(path_dst).absolute()
    tool = [sys.executable, str(REPOSITORY / "tools" / "convert_fp8_to_bf16.py")]
    if not missing_of("model", target):
        print(f"fp8_cast_bf16: {target} is there", flush=True)
        return
    with one_at_a_time(target):
        if missing_of("model", target):
            exec_command(shlex.join([*tool, "--model-dir", path_src, "--save-dir", str(target)]))


def model_script(model_type: str) -> Path:
    """The file that holds a model's shape, which a shell sources; BadInputError if there is none of that name."""
    script = REPOSITORY / "scripts" / "models" / f"{model_type}.sh"
    if not script.is_file():
        near = difflib.get_close_matches(model_type, [path.stem for path in script.parent.glob("*.sh")])
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise BadInputError(f"megatron_model_type {model_type}: there is no scripts/models/{model_type}.sh{hint}")
    return script
