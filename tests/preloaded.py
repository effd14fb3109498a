"""What ranks of tests import, loaded once into the process that they are forked from (`tests.ranks`)."""

from __future__ import annotations

from slime.backends.megatron import patches

patches.install()

import slime.backends.megatron.trainer  # noqa: E402, F401
import tests.parallel.rollouts  # noqa: E402
import tests.parallel.tiny  # noqa: E402, F401
