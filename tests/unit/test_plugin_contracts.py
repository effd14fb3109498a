"""The contract files as users have them: a mistake of each kind, what it is told, and the files as programs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from slime.entry.arguments import GROUPS
from slime.options.flags.schema import flag_of, hook_fields
from tests.plugin_contracts import (
    test_plugin_generate_contracts,
    test_plugin_path_loading_contracts,
    test_plugin_rollout_contracts,
    test_plugin_runtime_hook_contracts,
)
from tests.plugin_contracts.contract import Contract
from tests.plugin_contracts.running import cases, variable_of, verdict, words_of

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "rollout": test_plugin_rollout_contracts.CONTRACTS,
    "generate": test_plugin_generate_contracts.CONTRACTS,
    "path_loading": test_plugin_path_loading_contracts.CONTRACTS,
    "runtime_hook": test_plugin_runtime_hook_contracts.CONTRACTS,
}
CONTRACTS = {contract.flag: contract for contracts in FILES.values() for contract in contracts}
_ONE_TURN = "from slime.rollout.sglang_rollout import generate\n"
_AGAIN = (
    _ONE_TURN + "from slime.rollout.tokenizer import load_tokenizer\n"
    "async def f(args, sample, p):\n    s = await generate(args, sample, p)\n"
    "    tokenizer, response, log_probs = load_tokenizer(args.hf_checkpoint), s.tokens, s.rollout_log_probs\n"
    "    s.reset_response()\n    s.status = s.Status.COMPLETED\n"
    "    tokens = tokenizer(tokenizer.decode(response[len(s.tokens):]), add_special_tokens=False)['input_ids']\n"
)
_AGENT = (
    "from tests.plugin_contracts.plugins import run_agent\n"
    "async def f(url, prompt, asked, metadata):\n    await run_agent(url, prompt, asked, metadata)\n"
)
_GROUPS = (
    "from slime.data import Sample\n"
    "def groups(args, source):\n"
    "    drawn = source.get_samples(args.rollout_batch_size)\n"
    "    for sample in [s for group in drawn for s in group]:\n"
    "        sample.tokens, sample.reward = [1], 1.0\n"
    "        sample.append_response_tokens(tokens=[2], log_probs=[-1.0], text='x')\n"
    "        sample.status = Sample.Status.COMPLETED\n"
    "    return drawn\n"
)
_SOURCE = (
    "from slime.data import Sample\n"
    "class Source:\n"
    "    def __init__(self, args): self.n, self.at = args.n_samples_per_prompt, 0\n"
    "    def group(self):\n"
    "        self.at += 1\n"
    "        return [Sample(prompt=str(self.at)) for _ in range(self.n)]\n"
    "    def get_samples(self, n): return [self.group() for _ in range(n)]\n"
    "    def add_samples(self, samples): pass\n"
)
_CONVERT = "from tests.plugin_contracts.plugins import convert_samples_to_train_data as right\n"
_TIS = "args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths"

MISTAKES: list[tuple[str, str, str]] = [
    # a rollout
    ("--rollout-function-path", "def f(args, i, s, evaluation=False): return None", "it returned NoneType"),
    ("--rollout-function-path", "def f(args, i, s): return s.get_samples(1)", "it returned 1 groups, and --rollout-b"),
    ("--rollout-function-path", "def f(args, i, s): return s.get_samples(2)", "sample 0 has status Status.PENDING"),
    (
        "--rollout-function-path",
        _GROUPS + "def f(args, i, s):\n    g = groups(args, s)\n    g[0][1].reward = None\n    return g",
        "sample 1 has no reward[\\s\\S]*await async_rm",
    ),
    (
        "--rollout-function-path",
        _GROUPS + "def f(args, i, s):\n    s.get_samples(1)\n    return groups(args, s)",
        "of 3 prompts that it drew, 1 were neither trained, dropped nor put back[\\s\\S]*count_dropped",
    ),
    (
        "--rollout-function-path",
        _GROUPS + "def f(args, i, s, evaluation=False):\n    return {'a': {'rewards': [1], 'samples': [1, 2]}} "
        "if evaluation else groups(args, s)",
        r"data\['a'\]\['samples'\] is \[1, 2\]",
    ),
    # one sample
    ("--custom-generate-function-path", "async def f(args, sample): return sample", "too many positional arguments"),
    ("--custom-generate-function-path", "async def f(a, sample, p): pass", "must return a Sample or a non-empty list"),
    (
        "--custom-generate-function-path",
        "async def f(args, sample, p):\n    return helper()\ndef helper():\n    return {}['x']",
        r"raised KeyError: 'x'[\s\S]*mend what it raised[\s\S]*in f\n[\s\S]*in helper\n",
    ),
    (
        "--custom-generate-function-path",
        _ONE_TURN + "async def f(args, sample, p):\n    s = await generate(args, sample, p)\n"
        "    s.loss_mask = s.loss_mask[1:]\n    return s",
        r"loss_mask has \d+ entries for \d+ response tokens",
    ),
    (
        "--custom-generate-function-path",
        _ONE_TURN + "async def f(args, sample, p):\n    s = await generate(args, sample, p)\n"
        "    s.tokens[-2:] = s.tokens[:-3:-1]\n    return s",
        r"response token \d+ of \d+ is \d+, and the engine's token of its log-prob is \d+[\s\S]*never tokenised again",
    ),
    (
        "--custom-generate-function-path",
        _ONE_TURN + "async def f(args, sample, p):\n    s = await generate(args, sample, p)\n"
        "    s.append_response_tokens(tokens=[1], log_probs=[-99.0])\n    return s",
        r"\(1, log-prob -99.0\) is trained on, and the engine did not generate it",
    ),
    (
        "--custom-generate-function-path",
        _AGAIN + "    s.append_response_tokens(tokens=tokens, log_probs=log_probs[:len(tokens)])\n    return s",
        r"where the engine's tokens are not those .* of their text: response token 1 of \d+ is \d+, and the engine's "
        r"token of its log-prob is \d+\n.*do not tokenise the reply's text again",
    ),
    (
        "--custom-generate-function-path",
        _AGAIN + "    s.tokens, s.response_length = s.tokens + tokens, len(tokens)\n    return s",
        r"of their text: response token 1 of \d+ \(\d+, log-prob None\) is trained on, and the engine did not",
    ),
    (
        "--custom-generate-function-path",
        _AGAIN + "    s.append_response_tokens(tokens=tokens, log_probs=log_probs)\n    return s",
        r"of their text: .*\d+ trainable tokens need as many log-probs, got \d+\n.*do not tokenise[\s\S]*in f\n",
    ),
    (
        "--custom-generate-function-path",
        "import copy\n" + _ONE_TURN + "async def f(args, sample, p):\n    s = await generate(args, sample, p)\n"
        "    b = copy.deepcopy(s)\n    b.rollout_id = 77\n    return [s, b]",
        "cut one rollout into samples of different rollout_id",
    ),
    (
        "--custom-generate-function-path",
        _ONE_TURN + "async def f(args, sample, p):\n    s = await generate(args, sample, p)\n"
        "    s.rollout_id = 5\n    return s",
        "it set rollout_id, by which slime counts, and they were put back",
    ),
    # an agent
    ("--custom-agent-function-path", "async def f(base_url, prompt): pass", "too many positional arguments"),
    (
        "--custom-agent-function-path",
        "async def f(url, prompt, asked, metadata): pass",
        "of sample 0 it returned without a turn",
    ),
    ("--custom-agent-function-path", _AGENT + "    return 1.0", "it must return None or a dict, not 1.0"),
    # data, filters, rewards
    ("--data-source-path", "class f:\n    def __init__(self): pass", "too many positional arguments"),
    (
        "--data-source-path",
        _SOURCE + "class f(Source):\n    def get_samples(self, n): return [self.group()]",
        r"get_samples\(2\) gave 1 groups",
    ),
    (
        "--data-source-path",
        _SOURCE + "class f(Source):\n    def get_samples(self, n): return [[self.group()[0]] * self.n] * n",
        "samples share metadata",
    ),
    (
        "--data-source-path",
        _SOURCE + "class f(Source):\n    def save(self, i): pass\n    def load(self, i=None): pass",
        r"it would have gone on with '4', and goes on with '1'[\s\S]*write in save\(rollout_id\)",
    ),
    (
        "--data-source-path",
        _SOURCE + "class f(Source):\n    def add_samples(self, samples): raise OSError('full')",
        r"OSError: full[\s\S]*in add_samples",
    ),
    ("--buffer-filter-path", "def f(a, i, buffer, n): return buffer[:n]", "must take the groups .* out of the buffer"),
    ("--buffer-filter-path", "def f(a, i, buffer, n): pass", "NoneType|must return"),
    ("--buffer-filter-path", "def f(a, buffer, n): return []", "too many positional arguments"),
    ("--dynamic-sampling-filter-path", "def f(args, samples): return 1", "must return a bool or a DynamicFilterOutput"),
    (
        "--dynamic-sampling-filter-path",
        "def f(args, samples): return samples[0].reward > samples[1].reward",
        "raised IndexError",
    ),
    ("--rollout-sample-filter-path", "def f(args, groups): groups[0].pop()", "it changed which samples the groups"),
    ("--rollout-sample-filter-path", "def f(a, gs): gs[0][0].remove_sample = 1", r"remove_sample is \[1\]"),
    ("--rollout-all-samples-process-path", "def f(args, groups, source): source.nothing()", "raised AttributeError"),
    ("--rollout-sample-hook-path", "def f(args, sample): return 3", "must return a Sample or None, not 3"),
    ("--custom-rm-path", "def f(args, x): return 3", "a parameter sample or samples"),
    ("--custom-rm-path", "def f(args, sample): return 'good'", "must return a number or a dict, not 'good'"),
    ("--custom-rm-path", "def f(args, sample): pass", "has no reward"),
    ("--custom-rm-path", "def f(args, sample): return float('nan')", "its reward is nan"),
    ("--custom-rm-path", "def f(args, sample): return sample.response[0] == 'x'", "raised IndexError"),
    ("--custom-rm-path", "def f(args, samples): return [1.0]", "as many rewards as it was given samples, 2"),
    ("--eval-function-path", "def f(args, i, source): pass", "got an unexpected keyword argument 'evaluation'"),
    (
        "--eval-function-path",
        "def f(args, i, s, evaluation): return {'a': {'rewards': [1, 2], 'truncated': [True]}}",
        r"data\['a'\] has 2 rewards and 1 of truncated",
    ),
    # between rollout and step
    ("--custom-rollout-log-function-path", "def f(args, samples): pass", "too many positional arguments"),
    ("--custom-rollout-log-function-path", "def f(*v): return 'yes'", "must return True .* or False, not 'yes'"),
    (
        "--custom-eval-rollout-log-function-path",
        "def f(i, args, data, m): sum(data['contract']['rewards'])",
        "TypeError",
    ),
    ("--custom-reward-post-process-path", "def f(a, s): return [1.0] * 6", r"must return \(raw rewards, rewards\)"),
    ("--custom-reward-post-process-path", "def f(a, s): return [1.0], [1.0]", "1 values for 6 samples"),
    (
        "--custom-convert-samples-to-train-data-path",
        _CONVERT + "def f(args, samples):\n    d = right(args, samples)\n    del d['loss_masks']\n    return d",
        "the dict lacks loss_masks; it has",
    ),
    (
        "--custom-convert-samples-to-train-data-path",
        _CONVERT + "def f(args, samples): return right(args, samples) | {'reward': []}",
        "nobody reads reward; there are",
    ),
    ("--rollout-data-postprocess-path", "def f(args, i, d): d['rewards'] = []", r"changed rollout_data\['rewards'\]"),
    ("--custom-advantage-function-path", "def f(args, d): pass", r"rollout_data\['advantages'\] must be a list"),
    ("--custom-loss-function-path", "def f(args, b, logits, m): return logits, {}", "the loss must be a scalar"),
    ("--custom-loss-function-path", "def f(a, b, x, m): return x.log().sum(), {}", "values that are not finite"),
    ("--custom-tis-function-path", f"def f({_TIS}): return pg_loss.sum(), loss_masks, {{}}", "the loss must have a"),
    ("--custom-pg-loss-reducer-function-path", "def f(a, b, c, d): return lambda x: x", "must be a scalar"),
    ("--custom-megatron-init-path", "def f(args): args.no_such_option", "no_such_option"),
    ("--custom-model-provider-path", "def f(stage): pass", "too many positional arguments"),
    ("--custom-megatron-before-log-prob-hook-path", "def f(args, model): pass", "too many positional arguments"),
    ("--custom-megatron-before-train-step-hook-path", "def f(args, step): pass", "too many positional arguments"),
    ("--custom-update-weight-post-write-path", "def f(args): pass", "too many positional arguments"),
]


def broken(contracts: Sequence[Contract], words: list[str]) -> list[str]:
    """The blocks of the checks that fail; after a wrong signature none is run."""
    blocks = []
    for case in cases(contracts, words):
        outcome, text, _ = verdict(case, words)
        if outcome == "BROKEN":
            blocks.append(text)
            if case.check is None:
                break
    return blocks


@pytest.mark.parametrize(
    ("flag", "code", "problem"), MISTAKES, ids=[f"{f[2:]}-{i}" for i, (f, *_) in enumerate(MISTAKES)]
)
def test_a_mistake_is_told_with_path_signatures_and_what_to_change(
    flag: str, code: str, problem: str, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(code)
    blocks = broken([CONTRACTS[flag]], [flag, f"{mine}:f"])
    told = [block for block in blocks if re.search(problem, block)]
    assert told, blocks
    (head, *lines) = told[0].splitlines()
    assert head == f"BROKEN  {flag} {mine}:f"
    labels = [line.split(":")[0].strip() for line in lines if re.match(r"  \w+:", line)]
    assert [label for label in labels if label not in ("returned", "traceback")] == [
        *("check", "found", "expected", "problem", "change")
    ]
    assert str(mine) in lines[1]
    assert "slime cannot work with it" not in told[0] or "traceback:" in told[0]


DOCUMENTED = [
    (
        "--custom-generate-function-path",
        _ONE_TURN + "from slime.rollout.sampling import train_sampling_params\n"
        "async def f(args, samples, evaluation=False):\n"
        "    return [await generate(args, sample, train_sampling_params(args)) for sample in samples]\n",
    ),
    (
        "--custom-generate-function-path",
        _ONE_TURN + "async def f(args, samples, *, sampling_params):\n"
        "    return [await generate(args, sample, sampling_params) for sample in samples]\n",
    ),
    (
        "--data-source-path",
        "from slime.data import RolloutDataSourceWithBuffer\n"
        "class f(RolloutDataSourceWithBuffer):\n"
        "    def __init__(self, dataset, args):\n"
        "        super().__init__(dataset, args)\n"
        "        self.own = len(dataset)\n"
        "    def buffer_filter(self, args, buffer, num_samples):\n"
        "        chosen = buffer[-num_samples:]\n"
        "        del buffer[-num_samples:]\n"
        "        return chosen\n",
    ),
    (
        "--data-source-path",
        _SOURCE + "class f(Source):\n    def get_samples(self, n): return [self.group()[0] for _ in range(n)]\n",
    ),
    (
        "--dynamic-sampling-filter-path",
        "import torch\ndef f(args, samples, **kwargs):\n"
        "    rewards = [sample.reward for sample in samples]\n"
        "    return torch.tensor(rewards, dtype=torch.float).std() > 0.0\n",
    ),
    ("--custom-rm-path", "async def f(args, sample, **kwargs): return float(sample.label == '1')\n"),
    ("--custom-rm-path", "async def f(args, samples): return [0.0 for sample in samples]\n"),
    ("--eval-function-path", "def f(args, i, s, evaluation): return {'a': {'rewards': [1, None]}}\n"),
    ("--rollout-function-path", _GROUPS + "def f(args, i, s, evaluation=False): return groups(args, s)\n"),
]
"""Right functions in the forms of the user's documents."""


@pytest.mark.parametrize(("flag", "code"), DOCUMENTED, ids=[f"{m[0][2:]}-{i}" for i, m in enumerate(DOCUMENTED)])
def test_forms_of_the_documents_keep_their_contracts(flag: str, code: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(code)
    blocks = broken([CONTRACTS[flag]], [flag, f"{mine}:f"])
    assert not [block for block in blocks if "With evaluation=True" not in block]


def test_every_function_path_has_a_contract_and_a_mistake() -> None:
    flags = {flag_of(field) for field in hook_fields(GROUPS)}
    assert set(CONTRACTS) == flags
    assert {flag for flag, *_ in MISTAKES} == flags


def test_a_function_that_hangs_is_left_behind(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("import time\ndef f(args, rollout_id, source):\n    time.sleep(200)\n    return []\n")
    words = ["--rollout-function-path", f"{mine}:f", "--contract-timeout", "3"]
    started = time.monotonic()
    case = cases(FILES["rollout"], words)[1]
    outcome, text, _ = verdict(case, words)
    assert outcome == "BROKEN"
    assert time.monotonic() - started < 100
    assert "did not end within 3 s (--contract-timeout); it is at line 3: time.sleep(200)" in text


def test_an_object_that_cannot_be_asked_for_anything(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "class Shy:\n    def __getattr__(self, name): raise RuntimeError(name)\n"
        "    def __call__(self, args, sample): return 1.0\nf = Shy()\n"
    )
    words = ["--custom-rm-path", f"{mine}:f"]
    (block,) = broken([CONTRACTS["--custom-rm-path"]], words)
    assert "  found:    an object of Shy\n" in block
    assert "  problem:  asking it for its parameters raised RuntimeError: " in block
    assert "  change:   name a plain function, which may call it" in block


def test_what_the_function_reads_of_the_command_line(tmp_path: Path) -> None:
    mine, settings = tmp_path / "mine.py", tmp_path / "mine.yaml"
    mine.write_text(
        "def add_arguments(parser): parser.add_argument('--mine-limit', type=int, default=3)\n"
        "def reward_func(args, sample):\n"
        "    assert (args.mine_limit, args.max_turns, args.other) == (5, 2, [1])\n"
        "    return {'score': 1.0}\n"
    )
    settings.write_text("other: [1]\nmax_turns: 2\n")
    words = ["--custom-rm-path", str(mine), "--mine-limit", "5", "--custom-config-path", str(settings)]
    (block, *_) = broken([CONTRACTS["--custom-rm-path"]], words)
    assert "name one of them with --reward-key (now None)" in block
    assert broken([CONTRACTS["--custom-rm-path"]], [*words, "--reward-key", "score"]) == []
    (block, *_) = broken([CONTRACTS["--custom-rm-path"]], [*words, "--reward-key", "other"])
    assert "the reward is a dict with keys ['score']; name one of them with --reward-key (now 'other')" in block


def test_prompts_that_do_not_read_are_not_the_functions_mistake(tmp_path: Path) -> None:
    """Nor is it a right function's that it gets chat messages where it takes text."""
    mine, data = tmp_path / "mine.py", tmp_path / "data.jsonl"
    mine.write_text(
        _ONE_TURN + "def reward_func(args, sample): return 1.0\n"
        "async def own(args, sample, p):\n    sample.prompt.strip()\n    return await generate(args, sample, p)\n"
    )
    data.write_text(json.dumps({"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "label": "2"}) + "\n")
    reward = ["--custom-rm-path", f"{mine}:reward_func"]
    prompts = ["--prompt-data", str(data), "--input-key", "prompt", "--label-key"]
    (block, *_) = broken([CONTRACTS[reward[0]]], [*reward, *prompts, "answer"])
    assert re.fullmatch(r"BROKEN  --prompt-data .*: there is no key 'answer' \(--label-key\); the keys are .*", block)
    (block, *_) = broken([CONTRACTS[reward[0]]], [*reward, *prompts, "label"])
    assert re.match(r"BROKEN  --prompt-data .*holds chat messages: add --apply-chat-template", block)
    own = ["--custom-generate-function-path", f"{mine}:own"]
    (block, *_) = broken([CONTRACTS[own[0]]], [*own, *prompts, "label"])
    assert "change:   mend what it raised: the traceback ends there; if it takes text, add --apply-chat-temp" in block


def test_the_documented_environment_keeps_its_contracts(tmp_path: Path) -> None:
    mine = tmp_path / "my_env.py"
    text = (ROOT / "docs" / "customize.md").read_text(encoding="utf-8")
    mine.write_text(text.partition("```python\n")[2].partition("```")[0])
    reward = ["--custom-rm-path", f"{mine}:reward_func"]
    both = [*reward, "--custom-generate-function-path", f"{mine}:generate"]
    for flag in ("--custom-rm-path", "--custom-generate-function-path"):
        assert broken([CONTRACTS[flag]], both) == []
    alone = [verdict(case, reward) for case in cases([CONTRACTS["--custom-rm-path"]], reward)]
    notes = [note for outcome, _, given in alone if outcome == "BROKEN" for note in given]
    assert any("give --custom-generate-function-path too" in note for note in notes)


def test_an_environment_whose_rewards_are_dicts_is_judged_in_an_evaluation_too(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(_ONE_TURN + "def reward_func(args, sample): return {'score': 1.0}\n")
    words = ["--custom-generate-function-path", f"{mine}:generate", "--custom-rm-path", f"{mine}:reward_func"]
    assert broken([CONTRACTS["--custom-generate-function-path"]], [*words, "--reward-key", "score"]) == []


def test_the_environment_names_functions_for_pytest() -> None:
    flag = "--custom-generate-function-path"
    assert variable_of(flag) == "SLIME_CONTRACT_CUSTOM_GENERATE_FUNCTION_PATH"
    words = words_of({variable_of(flag): "a b.py:f", "SLIME_CONTRACT_ARGS": "--max-turns 2 --rm-type 'f1'"})
    assert words == ["--max-turns", "2", "--rm-type", "f1", flag, "a b.py:f"]
    assert {case.path for case in cases(FILES["generate"], words)} == {"a b.py:f"}
    own = {path for contract in FILES["generate"] for path in contract.own}
    assert {case.path for case in cases(FILES["generate"], [])} == own


def program(name: str, words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    file = ROOT / "tests" / "plugin_contracts" / f"test_plugin_{name}_contracts.py"
    return subprocess.run([sys.executable, str(file), *words], cwd=cwd, capture_output=True, text=True, timeout=300)


GOOD = {
    "rollout": ["--rollout-function-path", "slime.rollout.sglang_rollout.generate_rollout"],
    "generate": ["--custom-generate-function-path", "good.py", "--contract-answers", "one", "two"],
    "path_loading": ["--rollout-sample-filter-path", "good.py:drop_none"],
    "runtime_hook": ["--custom-rollout-log-function-path", "good:log"],
}
BAD = {
    "rollout": ["--rollout-function-path", "bad.py:none"],
    "generate": ["--custom-generate-function-path", "bad.py:none"],
    "path_loading": ["--rollout-all-samples-process-path", "bad.py:none"],
    "runtime_hook": ["--custom-reward-post-process-path", "bad.py:none"],
}


_IN_FULL = [pytest.param(name, marks=pytest.mark.full) for name in ("rollout", "path_loading", "runtime_hook")]


@pytest.mark.parametrize("name", ["generate", *_IN_FULL])
def test_each_file_is_a_program(name: str, tmp_path: Path) -> None:
    """Run from a user's own directory, without pytest's words in what it prints."""
    (tmp_path / "good.py").write_text(
        _ONE_TURN + "def drop_none(args, groups): pass\ndef log(rollout_id, args, samples, metrics, seconds): pass\n"
    )
    (tmp_path / "bad.py").write_text("def none(args, *others): raise ZeroDivisionError('mine')\n")
    good = program(name, GOOD[name], tmp_path)
    assert (good.returncode, good.stderr) == (0, ""), good.stdout + good.stderr
    assert f"ok      {GOOD[name][0]} " in good.stdout
    assert re.search(r"^\d+ checks kept, 0 broken", good.stdout, re.MULTILINE)
    bad = program(name, BAD[name], tmp_path)
    assert bad.returncode == 1, bad.stdout + bad.stderr
    assert bad.stdout.count("raised ZeroDivisionError: mine") + bad.stdout.count("ZeroDivisionError: mine") >= 2
    assert f"BROKEN  {BAD[name][0]} {tmp_path}/bad.py:none\n" in bad.stdout
    assert "pytest" not in (bad.stdout + bad.stderr).replace(str(tmp_path), "")
    assert bad.stderr == ""
    assert [line for line in bad.stdout.splitlines() if line.lstrip().startswith("File ")] == [
        f'      File "{tmp_path}/bad.py", line 1, in none'
    ]
