"""What an engine's process notes of its loads: with models that load as SGLang's do, without SGLang."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from slime.backends.sglang.loads import load_record
from slime.backends.sglang.loads.load_record import bound, note_of, prepare, stale_copies
from slime.backends.sglang.loads.loaded import Held, Loaded, Tally, digests, held_by, sample

NUM_GPUS = 0

Weights = Iterable[tuple[str, torch.Tensor]]
MODULE = "sglang.srt.models.of_this_test"


def default_weight_loader(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded)


class Fused(torch.nn.Parameter):
    """As the quantised ones of SGLang: its loader is a property."""

    _weight_loader: Callable[..., None]

    @property
    def weight_loader(self) -> Callable[..., None]:
        return self._weight_loader


class Model(torch.nn.Module):
    """Two matrices that are one parameter, and a norm that has no loader of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.gate_up = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.gate_up.weight_loader = self._load_part  # type: ignore[attr-defined]
        self.down = Fused(torch.zeros(4, 3), requires_grad=False)
        self.down._weight_loader = lambda parameter, loaded_weight: parameter.data.copy_(loaded_weight)

    def _load_part(self, parameter: torch.Tensor, loaded: torch.Tensor, part: int) -> None:
        parameter.data[3 * part : 3 * part + 3].copy_(loaded)

    def load_weights(self, weights: Weights) -> None:
        parameters: dict[str, Any] = dict(self.named_parameters())
        for name, tensor in weights:
            if name in ("gate", "up"):
                parameters["gate_up"].weight_loader(parameters["gate_up"], tensor, int(name == "up"))
            elif name in parameters:
                default = sys.modules[MODULE].default_weight_loader
                load = getattr(parameters[name], "weight_loader", default)
                options = {"loaded_weight": tensor} if name == "down" else {}
                load(parameters[name], **options) if options else load(parameters[name], tensor)


Model.__module__ = MODULE


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang's modules of models, which are one."""
    module = ModuleType(MODULE)
    module.default_weight_loader = default_weight_loader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    load_record._count_default_loads.cache_clear()
    yield
    load_record._count_default_loads.cache_clear()


@pytest.fixture
def model() -> Model:
    made = Model()
    prepare(made)
    prepare(made)  # at every load
    return made


SENT = [
    ("norm", torch.ones(4)),
    ("gate", torch.full((3, 4), 2.0)),
    ("up", torch.full((3, 4), 3.0)),
    ("down", torch.full((4, 3), 4.0)),
]
BYTES = (4 + 12 + 12 + 12) * 4


def tally(weights: Weights) -> Tally:
    made = Tally()
    for name, tensor in weights:
        made.add(name, tensor)
    return made


@pytest.mark.parametrize("form", [list, iter], ids=["list", "iterator"])
def test_all_that_is_given_and_taken_is_counted_and_then_forgotten(model: Model, form: Any) -> None:
    for part in (SENT[2:], SENT[:2]):
        model.load_weights(form(part))
    told = note_of(model).answer(model, 0)
    assert (told.given, told.taken, told.stale) == (tally(SENT), BYTES, ())
    assert told.given.nbytes == BYTES
    assert all(held.loaded for held in told.parameters.values())
    again = note_of(model).answer(model, 0)
    assert (again.given, again.taken) == (Tally(), 0)
    assert again.parameters == {name: replace(held, loaded=False) for name, held in told.parameters.items()}


def test_what_the_loader_drops_is_not_taken(model: Model) -> None:
    model.load_weights([*SENT[:3], ("other", SENT[3][1])])
    told = note_of(model).answer(model, 0)
    assert told.given.nbytes == BYTES
    assert told.taken == BYTES - SENT[3][1].nbytes
    assert [name for name, held in told.parameters.items() if not held.loaded] == ["down"]


def test_of_models_that_are_not_sglangs_nobody_knows_the_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Model):
        pass

    made = Elsewhere()
    prepare(made)
    made.load_weights(SENT)
    told = note_of(made).answer(made, 0)
    assert (told.given, told.taken) == (tally(SENT), None)


def test_marked_parameters_are_no_weights(model: Model) -> None:
    model.norm._skip_weight_check = True
    assert note_of(model).answer(model, 0).parameters.keys() == {"gate_up", "down"}


class Router(torch.nn.Module):
    """As those whose weight SGLang keeps a copy of in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("_weight_fp32", None, persistent=False)


def test_a_routers_copy_that_was_not_updated_is_found() -> None:
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"gate": Router()})})
    router: Any = model["mlp"]["gate"]  # type: ignore[index]
    assert list(stale_copies(model, 0)) == []
    router._weight_fp32 = router.weight.data.float()
    assert list(stale_copies(model, 0)) == []
    router.weight.data[1, 2] = 7.0
    assert list(stale_copies(model, 0)) == ["mlp.gate._weight_fp32"]
    prepare_and_ask = note_of(model).answer(model, 0)
    assert prepare_and_ask.stale == ("mlp.gate._weight_fp32",)


def test_strings_bring_everything_and_what_a_draft_has_taken() -> None:
    held = {"norm": Held("torch.float32", (4,), "ab", True), "down": Held("torch.bfloat16", (4, 3), "")}
    told = Loaded(Tally(3, 40, 2**64 - 1), 40, 0, ("gate._weight_fp32",), held)
    draft = Loaded(Tally(3, 40, 5), 12, 0, ("other",), {"eh_proj": Held("torch.float32", (2, 2), "cd")})
    strings = told.as_strings() | {f"draft.{name}": value for name, value in draft.as_strings().items()}
    got = Loaded.of_strings(strings)
    assert (got.given, got.taken, got.drafts) == (told.given, 40, 12)
    assert got.stale == ("gate._weight_fp32", "draft.other")
    assert got.parameters == held | {"draft.eh_proj": Held("torch.float32", (2, 2), "cd")}
    assert Loaded.of_strings(Loaded(taken=None).as_strings()) == Loaded(taken=None)


def test_a_sample_is_of_few_elements_and_in_the_end_of_all() -> None:
    tensor = torch.arange(40_000, dtype=torch.float32).view(200, 200)
    seen: set[float] = set()
    for number in range(79):
        part = sample(tensor, number).view(torch.float32)
        assert 500 <= len(part) <= 520
        seen |= set(part.tolist())
    assert len(seen) == 40_000
    assert torch.equal(sample(tensor, 3), sample(tensor.clone(), 3))
    with pytest.raises(ValueError, match="is not contiguous"):
        sample(tensor.t(), 0)


def test_digests_tell_values_apart_and_say_nothing_of_what_does_not_lie_in_order() -> None:
    one, other = torch.zeros(5), torch.zeros(5, dtype=torch.bfloat16)
    held = held_by([("one", one), ("t", torch.zeros(2, 3).t()), ("other", other), ("none", torch.zeros(0))], 1)
    assert held["t"] == Held("torch.float32", (3, 2), "")
    assert held["none"].digest == ""
    assert digests({"other": sample(other, 1)}) == {"other": held["other"].digest}
    one[3] = 1e-30
    assert held_by([("one", one)], 1)["one"].digest != held["one"].digest


def manager(modules: list[str], targets: set[str], weights: list[str]) -> Any:
    """SGLang's of an adapter "a", of one layer."""
    layer = Namespace(weights={name: torch.zeros(2) for name in weights})
    return Namespace(
        lora_modules=[dict.fromkeys(modules)],
        memory_pool=Namespace(target_modules=targets),
        loras={"a": Namespace(layers=[layer])},
    )


LAYER = "base_model.model.model.layers.0."


@pytest.mark.parametrize(
    ("modules", "bytes_bound"),
    [
        (["model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.down_proj"], 24),
        (["model.layers.0.self_attn.qkv_proj"], 16),
        ([], 0),
    ],
)
def test_an_adapter_is_bound_where_a_module_has_its_name(
    modules: list[str], bytes_bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def target_of(name: str, targets: set[str]) -> str:
        found = [target for target in targets if target in name]
        if not found:
            raise ValueError(name)
        return found[0]

    utils = ModuleType("sglang.srt.lora.utils")
    utils.get_target_module_name = target_of  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.lora.utils", utils)
    names = [f"{LAYER}self_attn.qkv_proj.lora_{part}.weight" for part in "AB"]
    names += [f"{LAYER}mlp.down_proj.lora_A.weight", f"{LAYER}mlp.odd.lora_A.weight"]
    assert sum(bound(manager(modules, {"qkv_proj", "down_proj"}, names), "a")) == bytes_bound
