"""Llama 3."""

from __future__ import annotations

from slime.models.family import Family
from slime.models.rows import ATTENTION, EMBEDDING, MLP, NORMS, OUTPUT
from slime.models.shape import decoder_args

FAMILY = Family(("llama",), EMBEDDING + NORMS + ATTENTION + MLP + OUTPUT, decoder_args)
