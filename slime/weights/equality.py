"""``--check-weight-update-equal``: proof, in the engine, that it holds the trainer's bytes."""

from __future__ import annotations

import contextlib
import hashlib
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slime.backends.sglang.client import EngineControl, EngineError
from slime.files.exports import weights_directory
from slime.files.hf_reader import read_engine_headers
from slime.files.hf_writer import NamedTensors
from slime.models import family_of, hf_config
from slime.utils.errors import abbreviate
from slime.weights.hf_directory import HFDirectoryWriter, load_format, stored_tensors


class EqualityCheck:
    """Compares what a transport brought with what SGLang's own loader reads from a checkpoint of the same tensors.

    An engine cannot be asked for a tensor by its Hugging Face name: it holds them fused and split over its ranks, in a
    layout that differs by model. It can digest the bytes of its parameters as they lie. So: write the trainer's
    tensors as a Hugging Face directory, make sure that the files hold their bytes (SHA-256) and that no tensor of the
    model is missing, digest the engine's parameters, load the directory by ``/update_weights_from_disk``, digest again.
    Equal digests of every parameter on every rank mean that the transport delivered the same bytes. The digests are
    SGLang's, of 64 bits; the directory must be on a file system that the engines see.
    """

    def __init__(self, args: Namespace, version: int) -> None:
        self._template = Path(args.hf_checkpoint)
        self._load_format = load_format(args)
        self._parent = weights_directory(args)
        self._writer = HFDirectoryWriter(args, f"check_v{version:06d}")
        self._digests: dict[str, str] = {}

    def add(self, bucket: NamedTensors) -> None:
        """Note a bucket that was pushed."""
        self._writer.add(bucket)
        for name, tensor in bucket:
            self._digests[name] = digest(tensor)

    def run(self, each_engine: Callable[[str, Callable[[EngineControl], Any]], dict[str, Any]]) -> None:
        """Compare, by `WeightPublisher.each_engine`. The engines hold the directory's weights afterwards, equal or not.
        EngineError names tensors that were not pushed, or engine, rank and parameters that differ."""
        missing = expected_names(self._template) - self._digests.keys()
        if missing:
            raise EngineError(f"check equal: tensors of {self._template} that were not pushed: {abbreviate(missing)}")
        directory, how = self._writer.commit(), self._load_format
        stored = {name: digest(tensor) for name, tensor in stored_tensors(directory)}
        if stored != self._digests:
            differing = {name for name in self._digests if stored.get(name) != self._digests[name]}
            raise EngineError(f"check equal: {directory} does not hold the trainer's bytes of {abbreviate(differing)}")
        pushed = each_engine("check equal: digest", lambda control: control.weight_checksums())
        each_engine("check equal: load", lambda control: control.update_weights_from_disk(str(directory), how))
        expected = each_engine("check equal: digest again", lambda control: control.weight_checksums())
        problems = [problem for url in pushed for problem in _differences(url, pushed[url], expected[url])]
        if problems:
            raise EngineError("check equal: pushed weights differ from the trainer's: " + "; ".join(problems))

    def discard(self) -> None:
        """Remove the directory, and the one above where nothing else is in it."""
        self._writer.discard()
        with contextlib.suppress(OSError):
            self._parent.rmdir()


def expected_names(hf_checkpoint: Path) -> set[str]:
    """The tensors that an update of this model must contain: those of its checkpoint that are trained, less an output
    layer that is tied to the embedding."""
    config = hf_config(hf_checkpoint)
    carried = family_of(config).carried(config)
    names = {name for name in read_engine_headers(hf_checkpoint) if not name.startswith(carried)}
    if config.tie_word_embeddings:
        names.discard("lm_head.weight")
    return names


def _differences(url: str, pushed: list[dict[str, str]], expected: list[dict[str, str]]) -> list[str]:
    found = []
    for rank, (ours, theirs) in enumerate(zip(pushed, expected, strict=True)):
        differing = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
        if differing:
            found.append(f"engine {url} rank {rank}: {abbreviate(differing)}")
    return found


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()
