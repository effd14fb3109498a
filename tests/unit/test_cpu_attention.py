"""Attention of many requests at once on CPUs, against SGLang's own, which computes them one by one."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.sglang import patches
from slime.backends.sglang.cpu import attention

NUM_GPUS = 0
_PLACES, _CHANNELS = 4096, 8


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    """Of this file run as a program: SGLang is not imported beside transformers that has looked for torchvision."""
    ran = subprocess.run([sys.executable, "-W", "ignore", __file__], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def compare() -> dict[str, float]:
    """Largest difference of each case between SGLang's class as it is released and as it is patched."""
    patches.install()
    module: Any = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
    released = module.TorchNativeAttnBackend
    patched = module.TorchNativeAttnBackend = type("Patched", (released,), {})
    attention.attend_together()
    found = {}
    for name, options in CASES.items():
        backend = _made(patched)
        # Groups are made anew for each forward pass, whose tensors may be those of the one before.
        for case in (options, options | {"lengths": [*options["lengths"][1:], (2, 1)]}):
            backend.init_forward_metadata(SimpleNamespace(out_cache_loc=None))
            other = _attended(_made(released), **case)
            assert other.isfinite().all()
            found[name] = max(found.get(name, 0.0), float((_attended(backend, **case) - other).abs().max()))
    own, all_ = (_attended(_made(patched), **CASES["prompts"] | {"causal": causal}) for causal in (True, False))
    return found | {"causal or not": float((own - all_).abs().max())}


def _made(backend: Any) -> Any:
    made = backend(SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None))
    made.init_forward_metadata(SimpleNamespace(out_cache_loc=None))
    return made


def _attended(
    backend: Any,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    *,
    decodes: bool = False,
    window: int | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """Of requests that have so many tokens in the cache and so many new ones, all random but the same at each call."""
    torch.manual_seed(1)
    longest = max(sum(n) for n in lengths)
    tokens = torch.randperm(_PLACES)[: len(lengths) * longest].view(-1, longest)
    cache = torch.randn(2, _PLACES, heads[1], _CHANNELS, dtype=torch.float64)
    unused = torch.ones(_PLACES, dtype=torch.bool)
    for row, (before, new) in zip(tokens, lengths, strict=True):
        unused[row[: before + new]] = False
    cache[:, unused] = torch.nan
    order = torch.randperm(len(lengths))  # requests are not in the order of their rows
    before, new = (torch.tensor(each)[order] for each in zip(*lengths, strict=True))
    query = torch.randn(int(new.sum()), heads[0], _CHANNELS, dtype=torch.float64)
    common = {"scaling": 0.3, "enable_gqa": heads[0] != heads[1], "sliding_window_size": window}
    of_batch = query, torch.full_like(query, torch.nan), *cache, tokens, order, before + new
    if decodes:
        return backend._run_sdpa_forward_decode(*of_batch, None, causal=False, **common)  # type: ignore[no-any-return]
    return backend._run_sdpa_forward_extend(*of_batch, before, new, None, causal=causal, **common)  # type: ignore[no-any-return]


PROMPTS = [(0, 7), (0, 1), (3, 5), (60, 2), (0, 40), (0, 33), (31, 1), (0, 13), (100, 30)]
"""With and without a cached beginning, short and long."""
STEPS = [(n, 1) for n in (0, 1, 6, 30, 31, 32, 33, 63, 64, 200)]
CASES: dict[str, dict[str, Any]] = {
    "prompts": {"lengths": PROMPTS, "heads": (4, 2)},
    "prompts of equal heads": {"lengths": PROMPTS, "heads": (4, 4)},
    "prompts in a window": {"lengths": PROMPTS, "heads": (4, 1), "window": 5},
    "prompts of an encoder": {"lengths": [(0, 7), (0, 12), (0, 50)], "heads": (4, 2), "causal": False},
    "steps": {"lengths": STEPS, "heads": (4, 2), "decodes": True},
    "steps of equal heads": {"lengths": STEPS, "heads": (4, 4), "decodes": True},
    "steps in a window": {"lengths": STEPS, "heads": (4, 1), "decodes": True, "window": 5},
    "a step": {"lengths": [(5, 1)], "heads": (2, 1), "decodes": True},
}


@pytest.mark.parametrize("case", CASES)
def test_requests_attend_as_alone(case: str, differences: dict[str, float]) -> None:
    """To the rounding of float64."""
    assert differences[case] < 1e-14


def test_an_encoders_tokens_attend_to_all(differences: dict[str, float]) -> None:
    assert differences["causal or not"] > 0.1


def test_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group nothing is padded to twice its length, and no more is computed at once than the limit."""
    monkeypatch.setattr(attention, "_MOST_SCORES", 64 * 64 * 3)
    new = torch.tensor([40, 64, 50, 33, 60, 45, 300, 5])
    tokens = torch.arange(8 * 300).view(8, 300)
    groups = list(attention.groups_of(tokens, torch.arange(8), torch.zeros_like(new), new, causal=True, window=None))
    assert sorted(group.is_query.sum(1).tolist() for group in groups) == [[5], [33, 60, 45], [40, 64, 50], [300]]
    served = torch.cat([group.queries[group.is_query] for group in groups])
    assert torch.equal(served.sort().values, torch.arange(int(new.sum())))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As engines on CPUs have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["prompts", "steps"])
@pytest.mark.parametrize(("heads", "channels"), [((4, 2), 16), ((8, 8), 32), ((6, 3), 24)])
def test_the_bits_of_a_request_do_not_depend_on_those_beside_it(
    heads: tuple[int, int], channels: int, kind: str, dtype: torch.dtype, one_thread: None
) -> None:
    """So a seeded run makes the same tokens, however its requests meet."""
    lengths = torch.randint(1, 90, (40,))
    new = torch.ones_like(lengths) if kind == "steps" else torch.randint(1, 90, (40,)).minimum(lengths)
    tokens = torch.randperm(_PLACES)[: 40 * 90].view(40, 90)
    key, value = (torch.randn(_PLACES, heads[1], channels).to(dtype) for _ in range(2))
    query = torch.randn(int(new.sum()), heads[0], channels).to(dtype)

    def attend(requests: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        of_them = requests, (lengths - new)[requests], new[requests]
        groups = list(attention.groups_of(tokens, *of_them, causal=True, window=None))
        return attention.attend_in_groups(query, torch.empty_like(query), key, value, groups, scale=None)

    together = attend(torch.arange(40), query).split(new.tolist())
    for request, (own, beside) in enumerate(zip(query.split(new.tolist()), together, strict=True)):
        assert torch.equal(attend(torch.tensor([request]), own), beside)


def test_deterministic_runs_attend_one_by_one() -> None:
    record = next(patch for patch in patches.EVERY_PROCESS if patch.name == "requests_together")
    facts = {name: patches.ServerFacts(cuda=name == "cuda", equal_bits=name == "bits") for name in ("", "cuda", "bits")}
    assert [name for name, server in facts.items() if record.wanted(server)] == [""]


if __name__ == "__main__":
    print(json.dumps(compare()))
