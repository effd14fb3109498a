#!/usr/bin/env python3
"""Predict a step of a run that nobody has made: its phases and what bounds them, tokens/s, MFU, memory.

    python3 tools/simulate.py step --model qwen3-8B --actor-num-gpus-per-node 8 --colocate --rollout-batch-size 128
    python3 tools/simulate.py step --model qwen3-4B --asynchronous --actor-num-gpus-per-node 4 --rollout-num-gpus 4
    python3 tools/simulate.py check
    python3 tools/simulate.py costs

A step is made of costs that were measured on one and two GPUs (`costs` prints each with its source); `check` compares
it with every run that was measured, those that no cost was fitted to included. docs/scale.md says what is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

import numpy as np  # noqa: E402

from slime.options.flags.schema import positive  # noqa: E402
from tools.simulating.constants import ATTENTION, COSTS  # noqa: E402
from tools.simulating.generation import TokenCosts  # noqa: E402
from tools.simulating.hardware import GPUS  # noqa: E402
from tools.simulating.model import read_model  # noqa: E402
from tools.simulating.plan import Layout, Plan, long_tailed  # noqa: E402
from tools.simulating.step import Step, simulate  # noqa: E402

_CLOSE = 0.1
"""How far a prediction may be off."""
_LAYOUT = {
    "tp": ("--tensor-model-parallel-size", "with sequence parallelism"),
    "pp": ("--pipeline-model-parallel-size", ""),
    "vpp": ("--num-virtual-stages-per-pipeline-rank", "virtual stages of each pipeline rank"),
    "cp": ("--context-parallel-size", ""),
    "ep": ("--expert-model-parallel-size", ""),
}
_COUNTS = {
    "--actor-num-nodes": (1, ""),
    "--actor-num-gpus-per-node": (8, ""),
    "--rollout-num-gpus": (0, "engines' own GPUs; with --colocate they have the trainers'"),
    "--rollout-num-gpus-per-engine": (1, ""),
    "--max-weight-staleness": (1, "with --asynchronous"),
    "--rollout-batch-size": (32, "prompts"),
    "--n-samples-per-prompt": (8, ""),
    "--prompt-len": (512, "tokens of each prompt"),
    "--rollout-max-response-len": (8192, ""),
    "--num-steps-per-rollout": (1, "optimizer steps"),
    "--max-tokens-per-gpu": (8192, "of a micro-batch"),
    "--sglang-server-concurrency": (512, ""),
    "--update-weight-buffer-size": (512 * 2**20, "bytes that a push sends at a time"),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; flags that train.py has too mean the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    step = commands.add_parser("step", help="predict a step", allow_abbrev=False)
    step.add_argument(
        "--model", required=True, help="a name of scripts/models, a directory with config.json, or its id"
    )
    step.add_argument("--num-layers", type=positive, help="of the model the first ones; default: all")
    step.add_argument("--gpu", choices=sorted(GPUS), default="h200", help="default: %(default)s")
    step.add_argument("--colocate", action="store_true", help="trainers and engines share GPUs, and take turns")
    step.add_argument("--asynchronous", action="store_true", help="train_async.py")
    for flag, (default, text) in _COUNTS.items():
        kind = int if default == 0 else positive
        step.add_argument(flag, type=kind, default=default, help=f"{text}; default: %(default)s".removeprefix("; "))
    for name, (flag, text) in _LAYOUT.items():
        step.add_argument(flag, dest=name, type=positive, default=1, help=text or None)
    step.add_argument("--recomputed", type=float, default=0.0, help="share of layers; default: %(default)s")
    median = "of long-tailed response lengths; default: all are as long as may be"
    step.add_argument("--response-median", type=positive, help=median)
    step.add_argument("--response-spread", type=float, default=0.9, help="of their logarithm; default: %(default)s")
    step.add_argument("--attention-backend", choices=sorted(ATTENTION), default="fa4", help="default: %(default)s")
    step.add_argument("--reference", action="store_true", help="a reference model scores all samples")
    static = "share of a GPU for an engine's weights and cache; default: %(default)s"
    step.add_argument("--sglang-mem-fraction-static", type=float, default=0.7, help=static)
    step.add_argument("--json", action="store_true", help="one JSON object in place of tables")
    commands.add_parser("check", help="compare predictions with what was measured", allow_abbrev=False)
    commands.add_parser("costs", help="print what predictions are made of, with sources", allow_abbrev=False)
    return parser.parse_args(argv)


def plan_of(options: argparse.Namespace) -> Plan:
    """ValueError where the numbers do not fit each other, or an engine has no room for the model."""
    for name, low, high in (("recomputed", 0.0, 1.0), ("sglang_mem_fraction_static", 0.05, 1.0)):
        if not low <= (value := getattr(options, name)) <= high:
            raise ValueError(f"--{name.replace('_', '-')} {value} is not within {low:g} and {high:g}")
    if options.response_spread < 0:
        raise ValueError(f"--response-spread {options.response_spread} is below 0")
    trainers = options.actor_num_nodes * options.actor_num_gpus_per_node
    serving = trainers if options.colocate else options.rollout_num_gpus
    if serving < 1 or serving % options.rollout_num_gpus_per_engine:
        raise ValueError(
            f"{serving} GPUs for engines are not a multiple of --rollout-num-gpus-per-engine "
            f"{options.rollout_num_gpus_per_engine}: give --rollout-num-gpus, or --colocate"
        )
    samples, longest = options.rollout_batch_size * options.n_samples_per_prompt, options.rollout_max_response_len
    responses = np.full(samples, longest)
    if options.response_median is not None:
        responses = long_tailed(samples, options.response_median, options.response_spread, longest)
    layout = Layout(**{field.name: getattr(options, field.name) for field in fields(Layout)})
    plan = Plan(
        read_model(options.model, options.num_layers),
        GPUS[options.gpu],
        trainers,
        serving // options.rollout_num_gpus_per_engine,
        options.rollout_num_gpus_per_engine,
        colocate=options.colocate,
        asynchronous=options.asynchronous,
        staleness=options.max_weight_staleness,
        layout=layout,
        prompt=options.prompt_len,
        responses=responses,
        group=options.n_samples_per_prompt,
        steps=options.num_steps_per_rollout,
        max_tokens=options.max_tokens_per_gpu,
        kernel=options.attention_backend,
        reference=options.reference,
        static=options.sglang_mem_fraction_static,
        concurrency=options.sglang_server_concurrency,
        bucket=options.update_weight_buffer_size,
    )
    TokenCosts(plan).places()
    return plan


def table(step: Step) -> list[str]:
    """What is predicted, for people."""
    report = step.report()
    lines = [f"{report['model']}, {report['parameters'] / 1e9:.1f}B parameters, on {report['gpus']} x {report['gpu']}"]
    lines.append(f"trainers: {report['trainers']}, {report['layout']}; engines: {report['engines']}; {report['loop']}")
    lines.append(f"a rollout: {report['samples']} samples, {report['tokens']} tokens, the longest {report['longest']}")
    lines += ["", f"{'phase':<30} {'s':>8}  {'share':>6}  what takes it"]
    for phase in step.phases:
        most = sorted(phase.parts.items(), key=lambda part: -part[1])[:3]
        what = ", ".join(f"{name} {seconds:.2f}" for name, seconds in most)
        lines.append(f"{phase.name:<30} {phase.seconds:>8.2f}  {phase.seconds / step.seconds:>6.0%}  {what}")
    together = "overlapping" if step.plan.asynchronous else "together"
    lines += [f"{'a step, ' + together:<30} {step.seconds:>8.2f}", ""]
    rates = (report["tokens_per_s"], report["tokens_per_s_per_gpu"], report["mfu_of_training"], report["mfu_of_step"])
    lines.append("{:,.0f} tokens/s, {:,.0f} a GPU; MFU of training {:.2f}, of the step {:.2f}".format(*rates))
    memory = step.memory
    parts = f"state {memory.state:.0f}, activations {memory.activations:.0f}"
    lines.append(
        f"GiB of a GPU that trains: {memory.trains:.0f} of {memory.capacity:.0f} ({parts})"
        f"{'' if memory.fits else ': it does NOT fit'}; of an engine: weights {memory.engine_weights:.0f}, cache "
        f"{memory.cache:.0f}"
    )
    return lines


def check() -> int:
    """Print each measured figure with its prediction; 1 where one that is held out is far off, and nobody knows why."""
    from tools.simulating.cases import all_cases

    print("| what | line | measured | predicted | deviation | |", "|---|---|---|---|---|---|", sep="\n")
    status = 0
    for case in all_cases():
        note = f"fitted: {case.fitted}" if case.fitted else case.why
        far = abs(case.deviation) > _CLOSE and not note
        status |= far
        numbers = f"{case.measured:.3g} | {case.predicted:.3g} | {case.deviation:+.1%}"
        print(f"| {case.name} | {case.line} | {numbers} | {'FAR OFF' if far else note} |")
    return status


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 where a check fails, 2 where what is asked for cannot be."""
    options = parse(argv)
    if options.command == "check":
        return check()
    if options.command == "costs":
        for name, cost in COSTS.items():
            print(f"{name:<20} {cost.value:>10.4g} {cost.unit:<32} {cost.source}")
        return 0
    try:
        plan = plan_of(options)
    except (ValueError, OSError) as error:
        print(f"simulate.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    step = simulate(plan)
    print(json.dumps(step.report(), indent=1) if options.json else "\n".join(table(step)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
