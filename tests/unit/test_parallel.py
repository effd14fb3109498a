"""Names that are given to megatron-core, which takes any."""

from __future__ import annotations

import inspect
import re

from slime.backends.megatron import compat

compat.install()

from megatron.core import parallel_state  # noqa: E402

from slime.backends.megatron.parallel import SMALL_GROUPS  # noqa: E402

NUM_GPUS = 0


def test_small_groups_are_names_of_megatrons_groups() -> None:
    known = set(re.findall(r'get_nccl_options\("(\w+)"', inspect.getsource(parallel_state)))
    assert set(SMALL_GROUPS) <= known
    assert "tp" in known - set(SMALL_GROUPS)
