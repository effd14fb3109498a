"""Make a tiny Hugging Face model with random weights and a byte-level tokenizer: everything local, in a second.

The default has about 0.9 M parameters in Qwen3's architecture and learns two-digit arithmetic within minutes on a CPU.
Every byte is a token, so a digit is one; so are the words of the chat template and ``\\boxed{``, to keep it short.
The same arguments and seed give the same files.

    python tools/make_tiny_model.py outputs/tiny --seed 1

With ``--like`` it has the shape of a published model, and no weights: for ``train.py --random-weights``.

    python tools/make_tiny_model.py outputs/qwen3-4b --like qwen3-4b
    python tools/make_tiny_model.py outputs/a-quarter --like qwen3-30b-a3b --num-layers 12

With ``--tools`` its chat template knows tools and calls of them, in the form of Qwen 3, with tokens of their own.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

from slime.files import atomic_io  # noqa: E402
from slime.files.storage import StorageError, writing  # noqa: E402
from slime.options.flags.schema import flag_named, positive  # noqa: E402

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SMALLEST_VOCABULARY = 320
SPECIAL_TOKENS = [PAD, TURN_START, TURN_END]
WORDS = ["system", "user", "assistant", "tool", "<think>", "</think>", "\\boxed{"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_WORDS = ["<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": "', '"}}']
TOOL_CHAT_TEMPLATE = (  # names and parameters of tools alone: a schema would be the longest part of a tiny conversation
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}"
    "{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message.get('tool_calls') or [] %}{{ '\n' if message['content'] or not loop.first }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARCHITECTURES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
}
_SIZES = ("num_layers", "hidden_size", "num_heads", "intermediate_size", "tie_word_embeddings")

_QWEN3 = {"num_kv_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
PUBLISHED: dict[str, dict[str, Any]] = {
    name: {"arch": "qwen3", **_QWEN3, **dict(zip(_SIZES, sizes, strict=True))}
    for name, sizes in {
        "qwen3-0.6b": (28, 1024, 16, 3072, True),
        "qwen3-1.7b": (28, 2048, 16, 6144, True),
        "qwen3-4b": (36, 2560, 32, 9728, True),
        "qwen3-8b": (36, 4096, 32, 12288, False),
    }.items()
}
PUBLISHED["qwen3-30b-a3b"] = {
    **{"arch": "qwen3_moe", **_QWEN3, "num_kv_heads": 4, "num_experts": 128, "experts_per_token": 8},
    **dict(zip(_SIZES, (48, 2048, 32, 6144, False), strict=True)),
    "moe_intermediate_size": 768,
}
"""Shapes of ``--like``, from the models' config.json."""
DEFAULTS: dict[str, Any] = {
    **{"arch": "qwen3", "dtype": "float32", "tie_word_embeddings": False, "moe_intermediate_size": None},
    **{"num_layers": 4, "hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": None},
    **{"intermediate_size": 384, "vocab_size": _SMALLEST_VOCABULARY, "max_position_embeddings": 2048},
    **{"num_experts": 8, "experts_per_token": 2, "seed": 0},
}
"""The model without ``--like``, where no flag says otherwise."""


def make_tokenizer(vocab_size: int, tools: bool = False) -> PreTrainedTokenizerFast:
    """Bytes, special tokens and a few words, filled up to ``vocab_size`` so that every id of the model decodes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = WORDS + (TOOL_WORDS if tools else [])
    unused = vocab_size - len(alphabet) - len(SPECIAL_TOKENS) - len(words)
    if unused < 0:
        raise ValueError(f"--vocab-size {vocab_size} is too small: the tokenizer has {vocab_size - unused} tokens")
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = SPECIAL_TOKENS + [f"<|unused_{i}|>" for i in range(unused)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    fast.chat_template = TOOL_CHAT_TEMPLATE if tools else CHAT_TEMPLATE
    return fast


def make_config(options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """The architecture's configuration for the shape that ``options`` give."""
    import transformers

    values: dict[str, Any] = {
        "vocab_size": options.vocab_size,
        "hidden_size": options.hidden_size,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_kv_heads,
        "intermediate_size": options.intermediate_size,
        "max_position_embeddings": options.max_position_embeddings,
        "tie_word_embeddings": options.tie_word_embeddings,
        "initializer_range": options.initializer_range,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "dtype": options.dtype,
    }
    if options.arch != "qwen2":
        values["head_dim"] = options.head_dim or options.hidden_size // options.num_heads
    if options.like is not None:
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    if options.arch == "qwen3_moe":
        values |= {
            "num_experts": options.num_experts,
            "num_experts_per_tok": options.experts_per_token,
            "moe_intermediate_size": options.moe_intermediate_size or options.intermediate_size,
            "norm_topk_prob": True,
        }
    config: PretrainedConfig = getattr(transformers, ARCHITECTURES[options.arch][0])(**values)
    return config


def make_model(config: PretrainedConfig, arch: str, seed: int) -> PreTrainedModel:
    """Random weights: matrices normal with deviation ``config.initializer_range``, gains 1, biases 0."""
    import torch
    import transformers

    model: PreTrainedModel = getattr(transformers, ARCHITECTURES[arch][1])(config).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() >= 2:
                parameter.normal_(0.0, config.initializer_range, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model.to(config.dtype)


def write(options: argparse.Namespace) -> int:
    """Write model and tokenizer to ``options.output``; returns the number of parameters that were written.

    Raises:
        ValueError: a shape that does not work, or an output directory that must not be replaced.
    """
    from transformers.utils import logging

    from slime.convert.hf_files import other_than_a_model

    check(options)
    logging.disable_progress_bar()
    output = Path(options.output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is not a directory")
    if reason := atomic_io.why_not_replaced(output):
        raise ValueError(reason)
    if output.is_dir() and any(output.iterdir()):
        if not options.overwrite:
            raise ValueError(f"{output} is not empty; pass --overwrite to replace it")
        if other := other_than_a_model(output):
            raise ValueError(f"{output} has other things in it than a model ({other}): name another output")
    # Of a published size only bytes have names: a response of random weights is read by nobody.
    tokenizer = make_tokenizer(options.vocab_size if options.like is None else _SMALLEST_VOCABULARY, options.tools)
    config = make_config(options, tokenizer)
    model = make_model(config, options.arch, options.seed) if options.like is None else None
    with writing("output", output), atomic_io.written_directory(output.resolve()) as directory:
        tokenizer.save_pretrained(directory)
        if model is None:
            config.architectures = [ARCHITECTURES[options.arch][1]]
            config.save_pretrained(directory)
        else:
            save(model, directory)
    return 0 if model is None else sum(parameter.numel() for parameter in model.parameters())


def save(model: PreTrainedModel, directory: Path) -> None:
    """`save_pretrained`, with weights that may be read by all who may read the config: safetensors gives them 0600."""
    model.save_pretrained(directory)
    for file in directory.glob("*.safetensors"):
        shutil.copymode(directory / "config.json", file)


def check(options: argparse.Namespace) -> None:
    """Raise ValueError where sizes do not fit each other."""
    for whole, part in (("hidden_size", "num_heads"), ("num_heads", "num_kv_heads")):
        if getattr(options, whole) % getattr(options, part):
            flags = [f"{flag_named(name)} {getattr(options, name)}" for name in (whole, part)]
            raise ValueError(f"{flags[0]} is not a multiple of {flags[1]}")
    if (options.hidden_size // options.num_heads) % 2:
        raise ValueError("--hidden-size / --num-heads must be even for rotary embeddings")
    if options.experts_per_token > options.num_experts:
        raise ValueError(f"--experts-per-token {options.experts_per_token} > --num-experts {options.num_experts}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", help="directory to write, in Hugging Face format")
    given: dict[str, Any] = {"default": argparse.SUPPRESS}  # so that --like can tell what else was asked for
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), help=f"default: {DEFAULTS['arch']}", **given)
    sizes = {
        "hidden-size": "width",
        "num-layers": "decoder layers",
        "num-heads": "attention heads",
        "num-kv-heads": "key/value heads",
        "intermediate-size": "width of the feed-forward layer, or of one expert",
        "vocab-size": "tokens, at least 266, or 272 with --tools",
        "max-position-embeddings": "longest sequence",
        "num-experts": "experts of a layer, qwen3_moe only",
        "experts-per-token": "experts that a token takes, qwen3_moe only",
    }
    for name, text in sizes.items():
        default = DEFAULTS[name.replace("-", "_")]
        parser.add_argument(f"--{name}", type=positive, help=f"{text}; default: {default}", **given)
    parser.add_argument(
        "--initializer-range",
        type=float,
        default=0.06,
        help="standard deviation of the matrices; the default learns well, 0.1 gives peaked predictions from the start",
    )
    parser.add_argument(
        "--tie-word-embeddings", action="store_true", help="one matrix for input and output embeddings", **given
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help=f"of the weights; default: {DEFAULTS['dtype']}",
        **given,
    )
    parser.add_argument("--seed", type=int, help=f"of the weights; default: {DEFAULTS['seed']}", **given)
    parser.add_argument(
        "--like",
        choices=sorted(PUBLISHED),
        help="this model's shape in bfloat16, without weights; --num-layers may differ",
    )
    parser.add_argument("--tools", action="store_true", help="a chat template that knows tools")
    parser.add_argument("--overwrite", action="store_true", help="replace a model that is there, and nothing else")
    options = parser.parse_args(argv)
    if options.like is None:
        return argparse.Namespace(**{**DEFAULTS, **vars(options)})
    also = [flag_named(name) for name in DEFAULTS if name in options and name != "num_layers"]
    if also:
        parser.error(f"--like {options.like} says the whole shape and has no weights: drop it or {', '.join(also)}")
    return argparse.Namespace(**{**DEFAULTS, **PUBLISHED[options.like], "dtype": "bfloat16", **vars(options)})


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        count = write(options)
    except (ValueError, OSError, StorageError) as error:
        print(f"make_tiny_model.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("make_tiny_model.py: interrupted", file=sys.stderr)
        return 130
    print(f"{options.output}: {options.arch}, {count:,} parameters, {options.dtype}, seed {options.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
