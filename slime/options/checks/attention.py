"""What computes attention in training: one table of kernels, what each can do, and which of them a run takes.

`slime.backends.megatron.layers.kernels` has a function for each row. Transformer Engine's attention is none of them,
nor is that of true on-policy mode. Every kernel takes grouped queries, and fewer queries than keys, as context
parallelism has them: causal masks are then aligned to the bottom right.
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from slime.options.errors import OptionError
from slime.options.rules import Rule, check

FLAG = "--attention-backend"
AUTO = "auto"
_OWN = "!custom_model_provider_path"
"""A model of the user's own may have attention of its own."""
_LARGE_MICRO_BATCH, _LONG_RESPONSE, _SHORT_SEQUENCE = 16384, 2048, 128
"""Tokens from which, or up to which, FlashAttention 4 was measured to be faster, or slower, than torch's."""
_FA4_WIDTHS = {*((width, width) for width in (32, 64, 96, 128, 256)), (192, 128)}
"""Channels of keys and of values."""

RULES = (
    Rule(
        "attention_backend=fused",
        "needs",
        "transformer_impl=transformer_engine",
        ", whose attention by cuDNN it is: take auto, fa4, flash or unfused",
        when=_OWN,
    ),
    Rule("attention_backend=local", ": Megatron's own attention is not for packed sequences: take unfused", when=_OWN),
)


@dataclass(frozen=True)
class Needs:
    """What a model and a run ask of attention.

    Attributes:
        dtype: of queries, keys and values, by torch's name.
        key_width: channels of a head's queries and keys; ``value_width``: of its values.
        device: ``cuda`` or ``cpu``; None where it is not known yet.
        capability: the GPU's compute capability, if it is known.
        deterministic: the same bits in every gradient.
        variants: what else enters the softmax: ``sinks``, ``sliding windows``, ``a soft cap``.
        micro_batch: tokens that a rank may have in a micro-batch; ``response``: that one may have; ``sequence``: that
            one and its prompt may have. None where the options set no bound.
    """

    dtype: str
    key_width: int
    value_width: int
    device: str | None = None
    capability: tuple[int, int] | None = None
    deterministic: bool = False
    variants: tuple[str, ...] = ()
    micro_batch: int | None = None
    response: int | None = None
    sequence: int | None = None


@dataclass(frozen=True)
class Kernel:
    """One row: what a kernel computes with, whatever a model asks."""

    name: str
    what: str
    takes: Callable[[Needs], bool]
    """Whether it has the needed widths of heads, which are ``widths`` in words."""
    widths: str
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    capabilities: range | None = None
    """Major compute capabilities of a kernel for GPUs only."""
    deterministic: bool = True
    variants: tuple[str, ...] = ()
    """flash-attn-4 has all three as arguments, which no model here has a use for yet."""
    package: str | None = None
    """What must be installed beside torch, and ``module``: how it is imported."""
    module: str = ""
    pays: Callable[[Needs], bool] = lambda needs: True
    """Whether ``auto`` takes it where it can be had: not before it was measured to be faster than what follows."""


def _fa4_takes(needs: Needs) -> bool:
    """The package says multiples of 8. Gradients of 4.0.0b19 do not compile for Hopper, with grouped queries, for heads
    of 24 channels and others that it pads (flash_bwd_preprocess.py: "cute.copy op expects pred to have compatible
    shape"), of 160 and of 192, nor where values have another width. Heads of 32 and 96 were compiled only."""
    return (needs.key_width, needs.value_width) in _FA4_WIDTHS


def _fa4_pays(needs: Needs) -> bool:
    """On Hopper, with heads of 128: the only ones that were timed (docs/performance.md). The host takes up to 0.5 ms
    more for a layer's calls, which only much work of the GPU hides; on short sequences the GPU is slower, too."""
    if (needs.key_width, needs.value_width) != (128, 128) or not needs.capability or needs.capability[0] != 9:
        return False
    if needs.sequence is not None and needs.sequence <= _SHORT_SEQUENCE:
        return False
    return (needs.micro_batch or 0) >= _LARGE_MICRO_BATCH or (needs.response or 0) >= _LONG_RESPONSE


def _flash_takes(needs: Needs) -> bool:
    return needs.key_width % 8 == 0 and needs.value_width <= needs.key_width <= 256


KERNELS = (
    Kernel(
        "fa4",
        "FlashAttention 4",
        _fa4_takes,
        "32, 64, 96, 128 or 256, with values as wide, or 192 with values of 128",
        capabilities=range(9, 12),
        package="flash-attn-4",
        module="flash_attn.cute",
        pays=_fa4_pays,
    ),
    Kernel(
        "flash",
        "torch's FlashAttention 2",
        _flash_takes,
        "multiples of 8 to 256, with values no wider",
        capabilities=range(8, 100),
    ),
    Kernel("unfused", "torch's SDPA", lambda needs: True, "any", dtypes=("bfloat16", "float16", "float32", "float64")),
)
"""Beginning with what ``auto`` prefers where it can and pays."""


def choose(backend: str, needs: Needs, absent: Mapping[str, str] | None = None) -> str:
    """The name of the kernel that ``--attention-backend`` means.

    Args:
        absent: by kernel, why it cannot be imported.

    Raises:
        OptionError: in one line, that the kernel asked for, or every one, cannot do what is needed, and which can.
    """
    lacking = {kernel.name: _lacks(kernel, needs) or (absent or {}).get(kernel.name) for kernel in KERNELS}
    able = [name for name, reason in lacking.items() if reason is None]
    if backend == AUTO and able:
        return next(kernel.name for kernel in KERNELS if kernel.name in able and kernel.pays(needs))
    if backend in able:
        return backend
    reason = lacking[KERNELS[-1].name if backend == AUTO else backend]
    alternatives = f"take {' or '.join(able)}" if able else "there is no kernel that does"
    raise OptionError(f"{FLAG} {backend}: {reason}: {alternatives}")


def _lacks(kernel: Kernel, needs: Needs) -> str | None:
    """The first thing that a kernel cannot do, in words."""
    what, majors = kernel.what, kernel.capabilities
    if majors and needs.device == "cpu":
        return f"{what} is for GPUs, and this host has none"
    if majors and needs.capability and needs.capability[0] not in majors:
        own = ".".join(map(str, needs.capability))
        return f"{what} is for GPUs of compute capability {majors[0]} to {majors[-1]}, and this one has {own}"
    if needs.dtype not in kernel.dtypes:
        return f"{what} computes in {' or '.join(kernel.dtypes)}, and the model is {needs.dtype}"
    if not kernel.takes(needs):
        values = f" and values of {needs.value_width}" if needs.value_width != needs.key_width else ""
        return f"{what} has no heads of {needs.key_width} channels{values} ({kernel.widths})"
    if needs.deterministic and not kernel.deterministic:
        return f"{what} has no deterministic gradient"
    if missing := [variant for variant in needs.variants if variant not in kernel.variants]:
        return f"{what} has no {' and no '.join(missing)} here"
    return None


def not_importable() -> dict[str, str]:
    """By kernel, the line that says that its package is not there; nothing is imported."""
    return {
        kernel.name: f"the package {kernel.package} is not installed"
        for kernel in KERNELS
        if kernel.package and not _found(kernel.module)
    }


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of the package above it
        return False


def named_kernel(args: Namespace) -> str:
    """What to give `choose`: ``--attention-backend`` where it names one of the table, else ``auto``."""
    return args.attention_backend if args.attention_backend in {kernel.name for kernel in KERNELS} else AUTO


def by_transformer_engine(args: Namespace) -> bool:
    """Whether Transformer Engine computes attention: it does with its layers, unless another package is asked for."""
    return bool(args.transformer_impl == "transformer_engine" and args.attention_backend != "fa4")


def needs_of(args: Namespace, device: str | None = None) -> Needs:
    """What the options tell of a run's attention but for lengths; ``device``: where trainers are, once it is known."""
    if args.multi_latent_attention:
        widths = (args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim)
    else:
        widths = (args.kv_channels, args.kv_channels)
    return Needs(args.params_dtype, *widths, device=device, deterministic=args.deterministic_mode)


def with_lengths(needs: Needs, args: Namespace) -> Needs:
    """With the bounds that the options set. They hold as long as a run does, so that all its passes have one kernel."""
    prompt, response = args.rollout_max_prompt_len, args.rollout_max_response_len
    bounds = (args.rollout_max_context_len, prompt + response if prompt and response else None)
    return replace(
        needs,
        micro_batch=args.max_tokens_per_gpu if args.use_dynamic_batch_size else None,
        response=response,
        sequence=min((bound for bound in bounds if bound is not None), default=None),
    )


def check_attention(args: Namespace, device: str | None = None) -> None:
    """OptionError for a kernel, asked for by its name, that is not there or cannot do what the options tell."""
    check(args, RULES)
    backend = named_kernel(args)
    if backend == AUTO or args.custom_model_provider_path or args.true_on_policy_mode or by_transformer_engine(args):
        return
    choose(backend, needs_of(args, device), not_importable())
