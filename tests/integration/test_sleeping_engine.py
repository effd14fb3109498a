"""When an engine of several ranks says that it sleeps: SGLang's own class, with a stand-in for the memory."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

NUM_GPUS = 0

pytestmark = pytest.mark.integration

_SLOW_S = 1.0


def _release(rank: int, work: str) -> None:
    """How many seconds before the other rank's memory was gone the first rank has answered: by SGLang, and mended."""
    from slime.backends.sglang import fixes, patches

    patches.install()
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput
    from sglang.srt.managers.scheduler_components import weight_updater

    class SlowSecondRank:
        gone = 0.0

        def pause(self, tag: str) -> None:
            time.sleep(_SLOW_S * rank)
            self.gone = time.time()

    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=2)
    runner = SimpleNamespace(model=torch.nn.Linear(2, 2), server_args=SimpleNamespace(weight_cache_mode="off"))
    early = []
    for mended in (False, True):
        if mended:
            fixes.sleep_when_all_do()
        memory = SlowSecondRank()
        manager = weight_updater.SchedulerWeightUpdaterManager(
            tp_worker=SimpleNamespace(model_runner=runner),
            draft_worker=None,
            tp_cpu_group=dist.group.WORLD,
            memory_saver_adapter=memory,
            flush_cache=lambda: True,
            is_fully_idle=lambda: True,
        )
        manager.release_memory_occupation(ReleaseMemoryOccupationReqInput())
        answered: Any = [None, None]
        dist.all_gather_object(answered, (time.time(), memory.gone))
        (answer, _), (_, gone) = answered
        early.append(gone - answer)
    if rank == 0:
        Path(work, "early.json").write_text(json.dumps(early))
    dist.destroy_process_group()


@pytest.mark.full
def test_the_memory_of_all_ranks_is_gone_when_the_first_answers(tmp_path: Path) -> None:
    run_ranks(_release, (str(tmp_path),), 2, forks=False)
    of_sglang, mended = json.loads((tmp_path / "early.json").read_text())
    assert of_sglang > _SLOW_S, "SGLang waits for all ranks now: drop fixes.sleep_when_all_do"
    assert mended <= 0
