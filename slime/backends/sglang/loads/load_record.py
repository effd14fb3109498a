"""Has an engine's processes note what they load, and tell it by the `/weights_checker` that the release has."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from slime.backends.sglang.loads.loaded import ACTION, Loaded, Tally, held_by, sample
from slime.backends.sglang.loads.stack_loader import load_stack
from slime.backends.sglang.scheduler_beats import when_scheduling_begins
from slime.files.expert_stacks import Stack

_MODELS = "sglang.srt.models"
_LOADER = "default_weight_loader"
_COPY_END = "_fp32"
"""How SGLang names buffers that are a weight in float32: ``_weight_fp32`` of ``weight``."""
_NOTE = "_slime_loads"
_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",  # until 0.5.17
    "load_weights_from_distributed",  # in 0.5.23, which receives in another method
    "update_weights_from_tensor",
)
"""Methods of SGLang's updaters that load, of which each release has three."""


class LoadNote:
    """Of one model of this process, since it was last asked."""

    def __init__(self, counts: bool) -> None:
        """``counts``: whether all loaders of its parameters are known."""
        self._counts = counts
        self._forget()

    def _forget(self) -> None:
        self.given = Tally()
        self.taken: list[int] = []  # loaders may be called by several threads, for which appending is safe
        self.reached: set[int] = set()

    def answer(self, model: torch.nn.Module, number: int) -> Loaded:
        """What was loaded, which is then forgotten, and what there is, by the sample of ``number``."""
        taken = sum(self.taken) if self._counts or not self.given.tensors else None
        # Scales of cached keys and values are no weights: SGLang marks them.
        parameters = ((n, p) for n, p in model.named_parameters() if not getattr(p, "_skip_weight_check", False))
        stale, held = tuple(stale_copies(model, number)), held_by(parameters, number, self.reached)
        told = Loaded(self.given, taken, stale=stale, parameters=held)
        self._forget()
        return told


def record_loads() -> None:
    """Has each scheduler note the names and bytes that loads of weights and adapters are given, and those that
    parameters take, and answer them, with digests of a sample of each parameter, when `/weights_checker` is asked.

    SGLang's own checksums are of every byte, which takes longer, and none tells what a load has dropped.
    """
    when_scheduling_begins(_patch)


def _patch(scheduler: Any) -> None:
    updaters: Any = importlib.import_module("sglang.srt.model_executor.model_runner_components.weight_updater")
    checkers: Any = importlib.import_module("sglang.srt.utils.weight_checker")
    managers: Any = importlib.import_module("sglang.srt.lora.lora_manager")
    for name in filter(functools.partial(hasattr, updaters.WeightUpdater), _UPDATES):
        setattr(updaters.WeightUpdater, name, _noting(getattr(updaters.WeightUpdater, name)))
    checkers.WeightChecker.handle = _answering(checkers.WeightChecker.handle)
    manager = managers.LoRAManager
    manager.load_lora_adapter_from_tensors = _noting_adapter(manager.load_lora_adapter_from_tensors)


def _noting(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def noted(self: Any, *args: Any, **options: Any) -> Any:
        prepare(self.get_model())
        return update(self, *args, **options)

    return noted


def _answering(handle: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(handle)
    def answer(self: Any, action: str, *args: Any, **options: Any) -> Any:
        if not action.startswith(ACTION):
            return handle(self, action, *args, **options)
        model = self._get_model()
        told = note_of(model).answer(model, int(action.removeprefix(ACTION)))
        # 0.5.23 says by "role" whether the model is one to draft by.
        rank = self._parallelism_info(**{name: options[name] for name in ("role",) if name in options}).model_dump()
        return {"checksums": told.as_strings(), "per_gpu_checksum": "", "parallelism_info": rank}

    return answer


def note_of(model: torch.nn.Module) -> LoadNote:
    """A model's own."""
    if not hasattr(model, _NOTE):
        object.__setattr__(model, _NOTE, LoadNote(type(model).__module__.startswith(f"{_MODELS}.")))
    note: LoadNote = getattr(model, _NOTE)
    return note


def prepare(model: Any) -> None:
    """Have a model's loads noted; again where parameters were made anew."""
    note = note_of(model)
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if loader is not None and not getattr(loader, "is_counted", False):
            # Parameters of the quantised have it as a property.
            setattr(
                parameter,
                "_weight_loader" if hasattr(parameter, "_weight_loader") else "weight_loader",
                _counted(loader),
            )
    _count_default_loads()
    load = model.load_weights
    if getattr(load, "is_noted", False):
        return

    @functools.wraps(load)
    def load_noted(weights: Any, *args: Any, **options: Any) -> Any:
        global _loading
        _loading = note
        try:
            return load(_tallied(note, model, weights), *args, **options)
        finally:
            _loading = None

    load_noted.is_noted = True  # type: ignore[attr-defined]
    object.__setattr__(model, "load_weights", load_noted)


@functools.cache  # SGLang imports the modules of all models at once
def _count_default_loads() -> None:
    """Those of parameters that have no loader of their own, which each model's module takes from elsewhere."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{_MODELS}.") and hasattr(module, _LOADER):
            setattr(module, _LOADER, _counted(getattr(module, _LOADER)))


_loading: LoadNote | None = None
"""Of the model that weights are being loaded into."""


def _tallied(note: LoadNote, model: torch.nn.Module, weights: Any) -> Any:
    """What the model's loader is to load: without stacks of experts, which are loaded here where that can be."""
    if not isinstance(weights, list):
        return _each_tallied(note, weights)
    rest: list[tuple[str, torch.Tensor]] = []  # as some loaders want it
    for name, tensor in weights:
        if (stack := Stack.of_name(name)) is None:
            note.given.add(name, tensor)
            rest.append((name, tensor))
            continue
        note.given.include(_tally_of(stack, tensor.dtype))
        if reached := load_stack(model, stack, tensor):
            note.taken.append(tensor.nbytes)
            note.reached |= {id(parameter) for parameter in reached}
        else:
            rest += stack.tensors(tensor)
    return rest


@functools.cache  # of each push the same
def _tally_of(stack: Stack, dtype: torch.dtype) -> Tally:
    """Of its tensors one by one, as whoever sent them counts them."""
    tally = Tally()
    for name, tensor in stack.tensors(torch.empty(stack.count, stack.numel, dtype=dtype, device="meta")):
        tally.add(name, tensor)
    return tally


def _each_tallied(note: LoadNote, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        note.given.add(name, tensor)
        yield name, tensor


def _counted(loader: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(loader)
    def load(parameter: Any, *args: Any, **options: Any) -> Any:
        result = loader(parameter, *args, **options)
        tensor = args[0] if args else options.get("loaded_weight")
        if _loading is not None and isinstance(tensor, torch.Tensor):
            _loading.taken.append(tensor.nbytes)
            _loading.reached.add(id(parameter))
        return result

    load.is_counted = True  # type: ignore[attr-defined]
    return load


def stale_copies(model: torch.nn.Module, number: int) -> Iterator[str]:
    """Buffers that are a weight in another type, as routers of experts have them, and differ from what it is now."""
    for path, module in model.named_modules():
        for name, copy in module._buffers.items():
            weight = module._parameters.get(name.strip("_").removesuffix(_COPY_END))
            if copy is None or weight is None or not name.endswith(_COPY_END) or copy.shape != weight.shape:
                continue
            if not torch.equal(sample(copy, number), sample(weight.detach().to(copy.dtype), number)):
                yield f"{path}.{name}"


def _noting_adapter(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def noted(self: Any, lora_ref: Any, tensors: dict[str, torch.Tensor], *args: Any, **options: Any) -> Any:
        result = load(self, lora_ref, tensors, *args, **options)
        if result.success:
            note = note_of(self.base_model)
            for name, tensor in tensors.items():
                note.given.add(name, tensor)
            note.taken += bound(self, lora_ref.lora_id)
        return result

    return noted


def bound(manager: Any, lora_id: str) -> list[int]:
    """Bytes of an adapter's tensors for which there is a module that computes with them."""
    target_of: Any = importlib.import_module("sglang.srt.lora.utils").get_target_module_name
    found = []
    for modules, layer in zip(manager.lora_modules, manager.loras[lora_id].layers, strict=False):
        there = {".".join(path.split(".")[-2:]) for path in modules}
        ends = there | {path.rpartition(".")[2] for path in there}
        for name, tensor in layer.weights.items():
            try:
                target = target_of(name, manager.memory_pool.target_modules)
            except ValueError:
                continue
            if target in ends or (".experts" in name and "experts" in ends):
                found.append(tensor.nbytes)
    return found
