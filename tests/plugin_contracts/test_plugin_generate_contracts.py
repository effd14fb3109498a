"""Contracts of functions that generate one sample, with tools and several turns; as a program it checks yours.

    python tests/plugin_contracts/test_plugin_generate_contracts.py --custom-generate-function-path my_env.py:generate
    python tests/plugin_contracts/test_plugin_generate_contracts.py --custom-agent-function-path my_agent.py:run

The model's part is played by a stand-in that answers with the texts of ``--contract-answers``.
"""

from __future__ import annotations

import asyncio
import copy
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.data.source.numbers import CHANGED
from slime.data.source.rollout_context import rollout_context
from slime.rollout.base_types import flatten_samples
from slime.rollout.batches.train_data import to_train_batches
from slime.rollout.engine.generation import prompt_tokens
from slime.rollout.runtime import current
from slime.rollout.sampling import train_sampling_params
from slime.rollout.sglang_rollout import generate_and_rm
from slime.utils.types import Group, Sample, Status
from tests.plugin_contracts.contract import BrokenError, Contract, NotMeantError, Subject, problem_of
from tests.plugin_contracts.running import cases, main, run_case, words_of
from tests.plugin_contracts.setting import eval_params, make_source

NUM_GPUS = 0

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_PLUGINS = Path(__file__).resolve().parent / "plugins.py"
_APPEND = (
    "append the engine's tokens by sample.append_response_tokens(args, tokens=..., log_probs=..., meta_info=...), and "
    "what a tool says by trainable=False; text is never tokenised again"
)

_SPLIT = "where the engine's tokens are not those that its tokenizer makes of their text"
_KEEP = (
    "take the reply's tokens as they are, each with its log-prob: pairs of meta_info['output_token_logprobs'] are "
    "(log-prob, token, text); do not tokenise the reply's text again, which may give other tokens"
)


def check_sample(subject: Subject) -> None:
    """A sample comes back finished, its tokens, log-probs and mask of one length"""
    (group,) = make_source(subject.args).get_samples(1)
    before = copy.deepcopy(group[0])
    for sample in flatten_samples([_generated(subject, group[0])]):
        _check_lengths(subject, sample)
        subject.must(
            sample.status in (Status.COMPLETED, Status.TRUNCATED),
            f"status is {sample.status}: {sample.failure or 'the sample is not done'}",
            "set sample.status to Sample.Status.COMPLETED or TRUNCATED, as meta_info['finish_reason'] says",
        )
        given = before.tokens or (prompt_tokens(subject.args, before) if isinstance(before.prompt, str) else [])
        if sample.prompt == before.prompt and sample.tokens[: len(given)] != given:
            subject.notes.append("tokens do not begin with those of the prompt as slime tokenises it")


def check_engine_tokens(subject: Subject) -> None:
    """Every trained token is one that the engine generated, with its log-prob"""
    (group,) = make_source(subject.args).get_samples(1)
    samples = flatten_samples([_generated(subject, group[0])])
    if not subject.engine.made:
        raise NotMeantError("it sent no request to the engine")
    if any(sample.rollout_log_probs is None for sample in samples):
        subject.notes.append("samples have no rollout_log_probs: --use-tis and the checks of the engine need them")
    for problem in _not_the_engines(subject, samples):
        raise BrokenError(problem, _APPEND)


def check_split_tokens(subject: Subject) -> None:
    """Tokens stay the engine's where their text would be tokenised otherwise"""
    args, engine = subject.args, subject.engine
    (group,) = make_source(args).get_samples(1)
    _generated(subject, group[0])  # what fails here fails whatever the tokens are
    engine.begin(args)
    engine.splits = True
    (group,) = make_source(args).get_samples(1)
    try:
        samples = flatten_samples([_generated(subject, group[0])])
        problem = next(_not_the_engines(subject, samples), "")
    except Exception as error:
        if not engine.num_split:
            raise
        raise BrokenError(f"{_SPLIT}: {problem_of(subject, error)}", _KEEP) from error
    if not engine.num_split:
        raise NotMeantError("no token of what the engine answered can be split in two")
    subject.must(not problem, f"{_SPLIT}: {problem}", _KEEP)


def _not_the_engines(subject: Subject, samples: list[Sample]) -> Iterator[str]:
    """What is wrong with each trained token that the engine did not generate, or not with its log-prob."""
    made = subject.engine.made
    for sample in samples:
        tokens = sample.tokens[len(sample.tokens) - sample.response_length :]
        mask = sample.loss_mask or [1] * sample.response_length
        log_probs: list[float | None] = list(sample.rollout_log_probs or [None] * sample.response_length)
        for position, (token, trained, log_prob) in enumerate(zip(tokens, mask, log_probs, strict=True)):
            known = token in made.values() if log_prob is None else made.get(log_prob) == token
            if known or not trained:
                continue
            at = f"response token {position} of {sample.response_length}"
            if log_prob is not None and log_prob in made:
                yield f"{at} is {token}, and the engine's token of its log-prob is {made[log_prob]}"
            else:
                yield f"{at} ({token}, log-prob {log_prob}) is trained on, and the engine did not generate it"


def check_group(subject: Subject) -> None:
    """The samples of a group are generated side by side, and can be trained on"""
    args = subject.args
    groups = make_source(args).get_samples(args.rollout_batch_size)
    done = [_generated(subject, group) for group in groups]
    where = f"{subject.contract.flag} {subject.path}"
    runtime = current()
    assert runtime is not None
    changed = sorted(told[2] for told in runtime.told if told[:2] == (CHANGED, where))
    subject.must(
        not changed,
        f"it set {', '.join(changed)}, by which slime counts, and they were put back",
        "leave group_index, index and rollout_id as they are, or None in new samples: those of one list share the ones "
        "of their sample; what is yours to note goes into Sample.metadata",
    )
    to_train_batches(args, flatten_samples(done), dp_size=1)


def check_evaluation(subject: Subject) -> None:
    """It generates for an evaluation too"""
    (group,) = make_source(subject.args).get_samples(1)
    for sample in flatten_samples([_generated(subject, group[0], evaluation=True)]):
        _check_lengths(subject, sample)


def check_interruption(subject: Subject) -> None:
    """A request that a weight update interrupts is not taken for a whole response"""
    (group,) = make_source(subject.args).get_samples(1)
    subject.engine.aborts = 1
    samples = flatten_samples([_generated(subject, group[0])])
    if not subject.engine.finishes:
        raise NotMeantError("it sent no request to the engine")
    subject.must(
        len(subject.engine.finishes) > 1 and all(sample.status is not Status.ABORTED for sample in samples),
        f"the engine answered with finish_reason abort, and the sample came back as {samples[-1].status.value}",
        "use `generate` of slime.rollout.sglang_rollout, which goes on by itself; or set sample.status to "
        "Sample.Status.ABORTED and return: the function is then called again with a new copy of the sample",
    )


def check_truncation(subject: Subject) -> None:
    """It ends where the engine has no room left"""
    subject.args.rollout_max_response_len = 8
    (group,) = make_source(subject.args).get_samples(1)
    samples = flatten_samples([_generated(subject, group[0])])
    if "length" not in subject.engine.finishes:
        raise NotMeantError("no request of it was cut off at --rollout-max-response-len")
    if all(sample.status is not Status.TRUNCATED for sample in samples):
        subject.notes.append("a response that was cut off at --rollout-max-response-len is not marked TRUNCATED")
    for sample in samples:
        _check_lengths(subject, sample)


def _generated(subject: Subject, sample: Sample | Group, evaluation: bool = False) -> Any:
    """What slime makes of a sample or a group by the function."""
    args = subject.args
    params = eval_params(args) if evaluation else train_sampling_params(args)

    async def run() -> Any:
        async with asyncio.timeout(args.rollout_timeout):
            return await generate_and_rm(args, sample, params, evaluation=evaluation)

    with rollout_context(0):
        return asyncio.run(run())


def _check_lengths(subject: Subject, sample: Sample) -> None:
    sample.check()
    subject.must(
        sample.response_length > 0 and len(sample.tokens) > sample.response_length,
        f"it has {len(sample.tokens)} tokens and response_length {sample.response_length}",
        "tokens are the prompt's and then the response's, and response_length counts the latter",
    )
    subject.must(
        all(type(token) is int for token in sample.tokens), "tokens are not all ints", "convert arrays by .tolist()"
    )
    subject.must(
        set(sample.loss_mask or [1]) <= {0, 1}, f"loss_mask has {set(sample.loss_mask or ())}", "1 trains, 0 does not"
    )
    subject.must(isinstance(sample.response, str), f"response is {sample.response!r:.80}", "response is the text")
    subject.must(
        all(isinstance(p, float) and p <= 0 for p in sample.rollout_log_probs or ()),
        "rollout_log_probs are not all floats of at most 0",
        _APPEND,
    )


CONTRACTS = (
    Contract(
        "--custom-generate-function-path",
        (
            "slime.rollout.sglang_rollout.generate",
            f"{_EXAMPLES}/multi_agent/rollout_with_multi_agents.py:generate_with_multi_agents",
            f"{_EXAMPLES}/retool/generate_with_retool.py:generate",
        ),
        "generate the response to sample.prompt (or after sample.tokens), write it into the sample by "
        "append_response_tokens, and return the sample, or a list of the samples that you cut it into",
        (
            *(check_sample, check_engine_tokens, check_split_tokens, check_group, check_evaluation),
            *(check_interruption, check_truncation),
        ),
    ),
    Contract(
        "--custom-agent-function-path",
        (f"{_PLUGINS}:run_agent",),
        "ask the model at base_url, an OpenAI-compatible server, for one turn or more, and return None or a dict that "
        "may have reward and metadata",
        (check_engine_tokens, check_split_tokens, check_group, check_evaluation, check_interruption),
    ),
)


def pytest_generate_tests(metafunc: Any) -> None:
    metafunc.parametrize("case", cases(CONTRACTS, words_of(os.environ)), ids=str)


def test_contract(case: Any) -> None:
    run_case(case)


if __name__ == "__main__":
    main(CONTRACTS)
