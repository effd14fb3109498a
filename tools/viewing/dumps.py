"""The rollouts that a run has saved: where they are, and the rewards of one by group."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.utils.errors import BadInputError

if TYPE_CHECKING:
    from tools.samples.library import Library
    from tools.samples.rollouts import Rollout

_MOST_POINTS, _MOST_GROUPS = 4000, 1000
_PLACEHOLDER = re.compile(r"\{[^}]*\}")


def options_of(run_dir: Path) -> dict[str, Any]:
    """The options of a run, from its config.yaml; none where there is no such file yet, or no PyYAML to read it."""
    try:
        import yaml
    except ImportError:
        return {}
    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    groups = config.values() if isinstance(config, dict) else ()
    return {name: value for group in groups if isinstance(group, dict) for name, value in group.items()}


class Dumps:
    """Saved rollouts of a run; torch, and the model's tokenizer, are loaded when one is first asked for."""

    def __init__(self, run_dir: Path, options: Mapping[str, Any], paths: list[Path], checkpoint: str | None) -> None:
        """``paths`` and ``checkpoint`` are those of the command line, which win over those of the run's options."""
        self.paths = paths or _places(run_dir, options.get("save_debug_rollout_data"), "rollout_data")
        self._train = [] if paths else _places(run_dir, options.get("save_debug_train_data"), "train_data")
        self._checkpoint = checkpoint or options.get("hf_checkpoint")
        self._library: Library | None = None

    def library(self) -> Library:
        """The files.

        Raises:
            BadInputError: the run has saved none, or this host lacks what reads them.
        """
        if not self.paths:
            raise BadInputError("the run saves no rollouts: it has no --save-debug-rollout-data or --dump-details")
        if self._library is None:
            try:
                from tools.samples.library import Library
            except ImportError as error:
                raise BadInputError(f"saved rollouts are read by torch: {error}") from error
            self._library = Library(self.paths, self._train, lambda: _tokenizer(self._checkpoint))
        return self._library

    def names(self) -> list[str]:
        """Of the files, in their order."""
        try:
            return list(self.library().files())
        except BadInputError:
            return []


def _places(run_dir: Path, pattern: Any, inside: str) -> list[Path]:
    """Where files of a run's option are: by the name that it gave, or, once the directory was moved, beside the run."""
    if not isinstance(pattern, str):
        return [run_dir / inside] if (run_dir / inside).is_dir() else []
    named = Path(_PLACEHOLDER.sub("*", pattern))
    places = [named, run_dir / named.parent.name / named.name, run_dir / named.name]
    return [next((place for place in places if any(place.parent.glob(place.name))), named)]


def _tokenizer(checkpoint: str | None) -> Any:
    """None where there is none here: the page then shows token ids."""
    if checkpoint is None or not Path(checkpoint).is_dir():
        return None
    from slime.rollout.tokenizer import load_tokenizer

    return load_tokenizer(checkpoint)


def rewards(rollout: Rollout, key: str | None) -> dict[str, Any]:
    """The rewards of a rollout; of rewards that are dicts the entry ``key``, or the one that its list shows.

    Returns:
        ``groups`` (some, if many), each with its number, place of the first sample, samples, least, mean and largest
        reward; how many there are, and of how many all rewards are equal, ``zero_variance``; ``points``, some, each
        [response length, reward, place]; ``versions`` of weights with the samples of each, and what else a table says.
    """
    from tools.samples.rollouts import reward_of
    from tools.samples.safe_files import to_json

    keys = rollout.reward_keys
    key = key if key in keys else "score" if "score" in keys else next(iter(keys), None)
    rows = [(row, reward_of(sample, key)) for row, sample in zip(rollout.rows, rollout.samples, strict=True)]
    of_group: dict[Any, list[tuple[int, float]]] = defaultdict(list)
    for row, reward in rows:
        if reward is not None:
            of_group[row["group"]].append((row["place"], reward))
    points = [(row["length"], reward, row["place"]) for row, reward in rows if reward is not None]
    groups = [_group(group, those) for group, those in of_group.items()]
    several = [group for group in groups if group["samples"] > 1]
    about = {
        "rollout_id": rollout.rollout_id,
        "reward_keys": keys,
        "reward_key": key,
        "groups": groups[:_MOST_GROUPS],
        "count": len(groups),
        "zero_variance": sum(group["least"] == group["largest"] for group in several),
        "several": len(several),
        "points": points[:: max(1, -(-len(points) // _MOST_POINTS))],
        "without_reward": len(rows) - len(points),
        "statuses": Counter(row["status"] for row, _ in rows),
        "versions": Counter(" → ".join(row["versions"]) or "unknown" for row, _ in rows),
        "mean": statistics.fmean(reward for _, reward, _ in points) if points else None,
    }
    return to_json(about)


def _group(group: Any, those: list[tuple[int, float]]) -> dict[str, Any]:
    values = [reward for _, reward in those]
    return {
        "group": group,
        "place": those[0][0],
        "samples": len(values),
        "least": min(values),
        "mean": statistics.fmean(values),
        "largest": max(values),
    }
