"""Traces of training by torch's profiler, one file a rank, rollout and part."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.profiler import profile

from slime.files.storage import writing
from slime.utils import device


@contextmanager
def profiled(args: Namespace, target: str, rollout_id: int) -> Iterator[None]:
    """Within: record, where ``--profile-target`` has ``target`` for this rollout; after: ``traces`` has the file."""
    if target not in (args.profile_target or ()) or not args.profile_step_start <= rollout_id < args.profile_step_end:
        yield
        return
    with profile(record_shapes=True) as recorded:
        yield
        device.synchronize()
    directory = Path(args.run_dir, "traces")
    with writing("--profile-target, in --run-dir", directory):
        directory.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(directory / f"{target}_{rollout_id}_rank{dist.get_rank()}.json.gz"))
