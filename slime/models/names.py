"""Whether the tensors of a Hugging Face directory are, by their names, those of its config.json's model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from slime.models.family import Family, Shape

_IGNORED_EXTRA = re.compile(r"\.rotary_emb\.inv_freq$")


def check_names(
    family: Family, shape: Shape, names: Iterable[str], directory: Path, carried: tuple[str, ...] = ()
) -> None:
    """Raise ValueError listing the tensors that a checkpoint lacks or has too many, but for what it may carry."""
    found = set(names)
    wanted = {source for name in family.parameters(shape) for source in family.sources(name, shape)}
    extra = {name for name in found - wanted if not (_IGNORED_EXTRA.search(name) or name.startswith(carried))}
    if shape.tied:
        extra.discard("lm_head.weight")
    problems = [
        f"{title}: {', '.join(sorted(some)[:10])}{f' and {len(some) - 10} more' if len(some) > 10 else ''}"
        for title, some in (("missing", wanted - found), ("unexpected", extra))
        if some
    ]
    if problems:
        raise ValueError(f"{directory}: weights do not fit config.json; {'; '.join(problems)}")
