"""Whether all adds up at a soak's end: prompts, samples, weights and events, against a run that nobody struck."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from slime.observability import events
from tools.soaking.plan import KINDS
from tools.soaking.watching import Event, is_of
from tools.soaking.workspace import PROMPTS, SAMPLES

_PARTS = ("trained", "dropped", "buffered", "in_flight")
_FOLLOWS = {
    ("disk_full", "driver_died"),
    *((kind, "push_failed") for kind, its in KINDS.items() if "engine_hangs" in its.told),
}
"""What happens after a fault to others than those whom it strikes."""
_CLOCKS_S = 0.5
_UNTIL_CALM_S = 30.0
"""After a fault is mended its last echoes may be told of: a request that was sent again, a start that was late."""
Check = tuple[str, bool, str]
"""What is held to, whether it is so, and the figures."""


def prompts(lines: Sequence[dict[str, Any]], num_rollout: int) -> Check:
    """Of metrics.jsonl: every prompt that was read is somewhere, in each line, and as many are trained as should be."""
    told = [line for line in lines if "rollout/prompts_read" in line]
    parts = [sum(line[f"rollout/prompts_{part}"] for part in _PARTS) for line in told]
    wrong = [line for line, total in zip(told, parts, strict=True) if line["rollout/prompts_read"] != total]
    last = {line["rollout/step"]: line for line in told}
    late = [n for n in range(num_rollout) if last.get(n, {}).get("rollout/prompts_trained") != PROMPTS * (n + 1)]
    text = f"{PROMPTS * num_rollout} prompts, {len(told)} lines, {len(wrong)} that do not add up, {len(late)} off"
    return "prompts: read = trained + dropped + buffered + in flight, after every rollout", not (wrong or late), text


def samples(made: Iterable[Sequence[dict[str, Any]]], num_rollout: int) -> Check:
    """Of the samples that were trained in each rollout: each once, none missing, of weights of that rollout alone."""
    seen: list[int] = []
    stale = 0
    for rollout_id, batch in enumerate(made):
        seen += [sample["index"] for sample in batch]
        stale += sum(set(sample["weight_versions"]) != {str(rollout_id)} for sample in batch)
    wanted = set(range(PROMPTS * SAMPLES * num_rollout))
    lost, twice = len(wanted - set(seen)), len(seen) - len(set(seen))
    text = f"{len(seen)} samples: {lost} lost, {twice} trained twice, {stale} by other weights than the newest"
    return "samples: none lost, none trained twice, none by old weights", not (lost or twice or stale), text


def same_samples(ours: Iterable[Sequence[dict[str, Any]]], theirs: Iterable[Sequence[dict[str, Any]]]) -> Check:
    """Whether both runs have made the same tokens, and rewarded them alike."""
    pairs = [list(map(_made, one)) == list(map(_made, other)) for one, other in zip(ours, theirs, strict=True)]
    text = f"{sum(pairs)} of {len(pairs)} rollouts"
    return "the same tokens and rewards as the run that nobody struck", bool(pairs) and all(pairs), text


def _made(sample: dict[str, Any]) -> tuple[int, list[int], Any]:
    return sample["index"], list(sample["tokens"]), sample["reward"]


def weights(ours: Path, theirs: Path) -> Check:
    """Whether two Hugging Face directories hold the same weights, to float32's rounding."""
    import torch
    from safetensors.torch import load_file

    found, expected = (load_file(path / "model.safetensors") for path in (ours, theirs))
    differences = [float((found[name] - tensor).abs().max()) for name, tensor in expected.items() if name in found]
    same = found.keys() == expected.keys() and max(differences) <= 1e-6
    text = f"{len(expected)} tensors, largest difference {max(differences):.1e}"
    bitwise = same and all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    return "the same final weights", same, f"{text}{', the same bits' if bitwise else ''}"


def explained(told: Sequence[Event], strikes: Sequence[dict[str, Any]]) -> Check:
    """Whether the run told of nothing that nobody has done to it."""
    others = [event for event in told if not any(_may_be_of(event, strike) for strike in strikes)]
    first = "".join(f"; {event['kind']} {event['subject']}: {event['cause'][:100]}" for event in others[:3])
    return "every event is of a fault that was injected", not others, f"{len(told)} events, {len(others)} others{first}"


def _may_be_of(event: Event, strike: dict[str, Any]) -> bool:
    """Whether an event is about whom a strike was at, or about what follows from it, and in its time."""
    if strike["subject"] is None:
        return False
    kind = KINDS[strike["kind"]]
    ends = strike["struck"] + (strike["back_s"] or kind.within) + _UNTIL_CALM_S
    its = is_of(event, kind.named or strike["subject"]) or (strike["kind"], event["kind"]) in _FOLLOWS
    return its and strike["struck"] - _CLOCKS_S <= event["time"] <= ends


def samples_of(run_dir: Path, num_rollout: int) -> Iterator[list[dict[str, Any]]]:
    """What each rollout of a run has dumped; nothing where it has not."""
    import torch

    for rollout_id in range(num_rollout):
        path = run_dir / f"samples_{rollout_id}.pt"
        yield torch.load(path, weights_only=True)["samples"] if path.exists() else []


def checks(run_dir: Path, reference: Path, num_rollout: int, strikes: Sequence[dict[str, Any]]) -> list[Check]:
    """All of them, of a run that has ended after ``num_rollout`` rollouts and its reference."""
    files = [run_dir / name for name in ("metrics.jsonl", events.FILE)]
    metrics, told = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    last = f"hf_{num_rollout - 1}"
    return [
        prompts(metrics, num_rollout),
        samples(samples_of(run_dir, num_rollout), num_rollout),
        same_samples(samples_of(run_dir, num_rollout), samples_of(reference, num_rollout)),
        weights(run_dir / last, reference / last),
        explained(told, strikes),
    ]


def table(strikes: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: of each kind how many faults were injected, and bit, in which phases, and seconds from the strike until
    the run told of it and until all was well again."""
    rows = ["| kind | injected | bit | phases | told after, median / max s | back after, median / max s |"]
    rows.append("|---|---|---|---|---|---|")
    for kind in KINDS:
        own = [line for line in strikes if line["kind"] == kind and line["subject"] is not None]
        bit = [line for line in own if line["bit"]]
        if own:
            phases = ", ".join(sorted({line["phase"] for line in bit}))
            times = " | ".join(_times([line[name] for line in bit]) for name in ("noticed_s", "back_s"))
            rows.append(f"| `{kind}` | {len(own)} | {len(bit)} | {phases} | {times} |")
    return rows


def _times(values: Sequence[float]) -> str:
    return f"{median(values):.1f} / {max(values):.1f}" if values else "-"
