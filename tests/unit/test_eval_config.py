"""``--eval-config``: every dataset's settings, where they come from, and what is wrong with a file."""

from __future__ import annotations

import pickle
import re
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.entry.arguments import describe, parse_args
from slime.options.eval_datasets import EvalDataset
from tests.command_line import Fails, Flags, Parse, command, refused, write_rows

NUM_GPUS = 0

FLAGS = "--eval-interval 2 --eval-config eval.yaml "


@pytest.fixture(autouse=True)
def directory(launch_directory: Path) -> Path:
    """The working directory: a model, data, and a file of hooks."""
    for name in ("aime", "gsm8k"):
        write_rows(launch_directory / f"{name}.jsonl")
    (launch_directory / "eval_hook.py").write_text(
        "async def reward_func(args, sample, **kwargs):\n    return 1.0\n"
        "async def generate(args, sample, sampling_params):\n    return sample\n"
    )
    return launch_directory


@pytest.fixture
def parse(directory: Path) -> Parse:
    """Options with the given content in ``eval.yaml``."""

    def run(content: Any, words: str = "", without: str = "") -> Namespace:
        (directory / "eval.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return parse_args(command(FLAGS + words, without))

    return run


EVERY_KEY = {
    "path": "gsm8k.jsonl@[0:1]",
    "rm_type": "boxed_f1",
    "input_key": "q",
    "label_key": "a",
    "tool_key": "t",
    "metadata_key": "m",
    "apply_chat_template": True,
    "apply_chat_template_kwargs": {"enable_thinking": False},
    "n_samples_per_eval_prompt": 8,
    "temperature": 0,
    "top_p": 0.5,
    "top_k": 3,
    "max_response_len": 9,
    "stop": ["END"],
    "stop_token_ids": [1, 2],
    "min_new_tokens": 4,
    "repetition_penalty": 1.5,
    "skip_special_tokens": True,
    "no_stop_trim": False,
    "custom_generate_function_path": "eval_hook.py",
    "metadata_overrides": {"level": 3, "api_key": "a secret"},
}


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, True),
        ({"temperature": 0.1}, False),
        ({"n_samples_per_eval_prompt": 1}, False),
        ({"custom_generate_function_path": "eval_hook.py"}, False),
    ],
)
def test_greedy_responses_to_one_prompt_are_one(
    changes: dict[str, Any], warned: bool, parse: Parse, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = {"path": "gsm8k.jsonl", "temperature": 0, "n_samples_per_eval_prompt": 4}
    parse({"datasets": {"mine": greedy | changes}})
    line = "warning: --eval-config eval.yaml: mine: at temperature 0 its 4 responses to a prompt"
    assert (line in capsys.readouterr().err) == warned
    parse_args(command("--eval-config eval.yaml"))
    assert line not in capsys.readouterr().err, "nobody evaluates"


@pytest.mark.parametrize("below_eval", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
def test_every_key_reaches_the_dataset(parse: Parse, directory: Path, below_eval: bool, as_list: bool) -> None:
    datasets: Any = [{"name": "full"} | EVERY_KEY] if as_list else {"full": EVERY_KEY}
    args = parse({"eval": {"datasets": datasets}} if below_eval else {"datasets": datasets})
    (dataset,) = args.eval_datasets
    hook = f"{directory}/eval_hook.py:generate"
    changed = {"path": f"{directory}/gsm8k.jsonl@[0:1]", "custom_generate_function_path": hook}
    assert {key: getattr(dataset, key) for key in EVERY_KEY} == EVERY_KEY | changed
    keys = {field.name for field in fields(EvalDataset)} - {"name", "source", "custom_rm_path", "named_by"}
    assert keys == set(EVERY_KEY), "a key that this test has never set"
    assert str(dataset) == "--eval-config eval.yaml: full"
    assert pickle.loads(pickle.dumps(args)).eval_datasets == [dataset]
    shown = yaml.safe_load(describe(args))["derived"]["eval_datasets"][0]
    assert "named_by" not in shown
    assert (shown["temperature"], shown["metadata_overrides"]) == (0, {"level": 3, "api_key": "<redacted>"})


def test_dataset_before_defaults_before_eval_flags_before_rollout_flags(parse: Parse) -> None:
    content = {
        "defaults": {"temperature": 0.5, "top_k": 7, "custom_rm_path": "eval_hook.py", "label_key": None},
        "datasets": {
            "first": {"path": "aime.jsonl", "temperature": 0.0, "rm_type": "f1"},
            "second": {"path": "aime.jsonl", "top_p": 0.1},
        },
    }
    words = "--eval-temperature 0.9 --eval-top-p 0.2 --rollout-top-p 0.3 --rollout-stop END FIN --eval-min-new-tokens 2"
    first, second = parse(content, words).eval_datasets
    assert [d.temperature for d in (first, second)] == [0.0, 0.5]
    assert [d.top_p for d in (first, second)] == [0.2, 0.1]
    assert {(d.top_k, d.max_response_len, d.label_key, d.min_new_tokens) for d in (first, second)} == {
        (7, 16, "label", 2)
    }
    assert first.stop == second.stop == ["END", "FIN"]
    assert (first.rm_type, first.custom_rm_path) == ("f1", None), "one reward, not two"
    assert second.rm_type is None
    assert str(second.custom_rm_path).endswith("/eval_hook.py:reward_func")


def test_pairs_and_file_together(parse: Parse, directory: Path) -> None:
    content = {"datasets": [{"name": "b", "path": "aime.jsonl", "stop": "END"}]}
    args = parse(content, "--eval-prompt-data a aime.jsonl --n-samples-per-eval-prompt 4")
    assert [(d.name, d.n_samples_per_eval_prompt, d.stop) for d in args.eval_datasets] == [
        ("a", 4, None),
        ("b", 4, ["END"]),
    ]
    assert args.eval_prompt_data == ["a", str(directory / "aime.jsonl")]


def test_datasets_with_rewards_of_their_own_need_no_label_and_no_reward_flag(parse: Parse) -> None:
    random = {"datasets": {"a": {"path": "aime.jsonl", "rm_type": "random"}}}
    assert parse(random, "--data-source-path slime.data.RolloutDataSource").eval_datasets[0].rm_type == "random"
    supervised = "--loss-type sft_loss --n-samples-per-prompt 1"
    parse(random, supervised, "--rm-type --label-key")


@refused(
    """
a: [ -> --eval-config eval.yaml: while parsing
[] -> --eval-config eval.yaml: there are no datasets in it
eval: {defaults: {}} -> there are no datasets in it
datasets: 3 -> datasets: neither a list nor a mapping by name, but 3
{datasets: {a: {path: aime.jsonl}}, dfaults: {}} -> unknown key 'dfaults': there are defaults and datasets
datasets: {a: aime.jsonl} -> eval.yaml: a: not a mapping of keys to values, but 'aime.jsonl'
datasets: [aime, math] -> eval.yaml: dataset 0: not a mapping (name, path, ...), but 'aime'
datasets: [{name: a, path: aime.jsonl}, null] -> eval.yaml: dataset 1: not a mapping (name, path, ...), but None
datasets: [{path: aime.jsonl}] -> dataset 0: its name must be text, not None
datasets: {2024: {path: aime.jsonl}} -> dataset 0: its name must be text, not 2024
datasets: {a: {name: b, path: aime.jsonl}} -> a: a dataset by name has no key 'name'
datasets: {a: {}} -> eval.yaml: a: path is missing
datasets: {a: {path: no.jsonl}} -> eval.yaml: a: path no.jsonl: there is no such file
datasets: [{name: a, path: aime.jsonl}, {name: a, path: aime.jsonl}] -> eval.yaml: names 'a' twice
datasets: {a: {path: aime.jsonl, temprature: 1}}
    -> eval.yaml: a: unknown key 'temprature'; did you mean temperature?
{defaults: {n_samples: 3}, datasets: {a: {path: aime.jsonl}}} -> eval.yaml: defaults: unknown key 'n_samples'
{defaults: {path: x}, datasets: {a: {path: aime.jsonl}}} -> defaults: unknown key 'path'
datasets: {a: {path: aime.jsonl, multimodal_keys: {}}} -> multimodal_keys is not available yet
datasets: {a: {path: aime.jsonl, app_service: x}} -> app_service has no effect in the upstream system
datasets: {a: {path: aime.jsonl, temperature: hot}} -> a: temperature must be a number, not 'hot'
datasets: {a: {path: aime.jsonl, temperature: -1}} -> a: temperature must be at least 0, not -1
datasets: {a: {path: aime.jsonl, top_p: 0}} -> a: top_p must be above 0, not 0
datasets: {a: {path: aime.jsonl, top_k: 0}} -> a: top_k must be -1 (all) or at least 1, not 0
datasets: {a: {path: aime.jsonl, top_k: true}} -> a: top_k must be a whole number, not True
datasets: {a: {path: aime.jsonl, stop: [1]}} -> a: stop must be a list, each text, not [1]
datasets: {a: {path: aime.jsonl, stop: [END, '']}} -> a: stop has an empty text in it: drop it, or
datasets: {a: {path: aime.jsonl, stop: ''}} -> a: stop has an empty text in it
{defaults: {stop: ['']}, datasets: {a: {path: aime.jsonl}}} -> defaults: stop has an empty text in it
datasets: {a: {path: aime.jsonl, input_key: ''}} -> a: input_key is empty: drop it, or write null
datasets: {a: {path: aime.jsonl, min_new_tokens: 17}} -> min_new_tokens 17 is more than max_response_len 16
datasets: {a: {path: aime.jsonl, rm_type: maths}} -> eval.yaml: a: rm_type maths: there are dapo
datasets: {a: {path: aime.jsonl, rm_type: dapo}} -> a: rm_type dapo answers with an object: --eval-reward-key
datasets: {a: {path: aime.jsonl, metadata_overrides: {rm_type: dapo}}}
    -> rm_type dapo answers with an object: --eval-reward-key
datasets: {a: {path: aime.jsonl, metadata_overrides: {rm_type: boxed_remote_rm}}}
    -> rm_type boxed_remote_rm needs --rm-url
datasets: {a: {path: aime.jsonl, metadata_overrides: {rm_type: maths}}} -> rm_type maths: there are dapo
datasets: {a: {path: aime.jsonl, metadata_overrides: {rm_type: 3}}} -> rm_type must be text, not 3
datasets: {a: {path: aime.jsonl, rm_type: f1, custom_rm_path: eval_hook.py}}
    -> a: rm_type and custom_rm_path exclude each other
datasets: {a: {path: aime.jsonl, custom_rm_path: eval_hook.py:reward}}
    -> eval.yaml: a: custom_rm_path eval_hook.py:reward: eval_hook.py has no 'reward'; did you mean reward_func?
"""
)
def test_what_is_wrong_is_one_line_with_its_place(directory: Path, fails: Fails, flags: Flags, message: str) -> None:
    """Here ``flags`` are the file's content."""
    (directory / "eval.yaml").write_text(flags[0])
    assert message in fails(FLAGS)


@pytest.mark.parametrize("page", ["run.md", "zh/run.md"])
def test_the_documentation_has_every_key_and_its_example_is_right(page: str, parse: Parse, directory: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / page).read_text()
    assert [key for key in EVERY_KEY if f"`{key}`" not in text] == []
    (directory / "data").mkdir()
    for name in ("aime.jsonl", "facts.parquet"):
        (directory / "data" / name).touch()
    example = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0]
    aime, facts = parse(example).eval_datasets
    assert (aime.n_samples_per_eval_prompt, facts.n_samples_per_eval_prompt) == (16, 4)
    assert (aime.max_response_len, facts.temperature, facts.rm_type) == (2048, 0.0, "f1")


def test_a_file_that_is_missing_a_name_in_both_sources_and_no_interval(
    directory: Path, fails: Fails, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--eval-config none.yaml: " in fails("--eval-config none.yaml --eval-interval 1")
    (directory / "eval.yaml").write_text("datasets: {a: {path: aime.jsonl}}")
    both = fails(f"{FLAGS} --eval-prompt-data a aime.jsonl")
    assert "--eval-config eval.yaml: names 'a', and so does --eval-prompt-data" in both
    (directory / "eval.yaml").write_text("datasets: {a: {path: aime.jsonl, rm_type: f1}}")
    no_label = fails(f"{FLAGS} --loss-type sft_loss --n-samples-per-prompt 1", "--label-key --rm-type")
    assert "--eval-config eval.yaml: a: rm_type f1 compares responses" in no_label
    parse_args(command("--eval-config eval.yaml"))
    assert "warning: --eval-config has no effect without --eval-interval" in capsys.readouterr().err
    nothing = fails("--num-rollout 0 --eval-config eval.yaml", "--num-rollout")
    assert nothing == "--num-rollout 0 with --eval-config evaluates nothing: add --eval-interval 1"
