"""What counts as a secret among options, and what only sounds like one."""

from __future__ import annotations

import secrets
from argparse import Namespace
from typing import Any

import pytest

from slime.ray.engine_actor import EnginePlan
from slime.utils.redaction import REDACTED, redacted, redacted_words
from slime.weights import EngineAddress

SECRETS = """
WANDB_API_KEY HF_TOKEN AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID wandb_key sglang_router_api_key api_keys judge_secret
sglang_ssl_keyfile_password openai-api-key apiKey accessToken token key judge_credentials db_passwd secret_of_judge
bearer_token_value
"""
COLUMNS = """
input_key label_key metadata_key tool_key reward_key eval_input_key eval_label_key eval_reward_key eval_tool_key
"""


@pytest.mark.parametrize("name", SECRETS.split())
def test_secrets_are_replaced(name: str) -> None:
    secret = secrets.token_urlsafe(8)
    assert redacted({name: secret}) == {name: REDACTED}
    assert redacted({"judge": {name: [secret]}, "n": 1}) == {"judge": {name: REDACTED}, "n": 1}
    assert redacted({name: None}) == {name: None}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "column") for name in COLUMNS.split()),
        ("multimodal_keys", ["image"]),
        ("rollout_stop_token_ids", [1, 2]),
        ("rollout_skip_special_tokens", True),
        ("max_tokens_per_gpu", 4608),
        ("max_tokens", "4608"),
        ("sglang_max_total_tokens", 2**20),
        ("calculate_per_token_loss", False),
        ("no_api_keys", True),
        ("moe_token_dispatcher_type", "alltoall"),
        ("moe_token_drop_policy", "probs"),
        ("tokenizer_type", "HuggingFaceTokenizer"),
        ("sglang_tokenizer_mode", "auto"),
        ("sglang_prompt_tokens_buckets", ["tse", "10"]),
        ("sglang_bucket_inter_token_latency", [0.1]),
        ("linear_num_key_heads", 16),
        ("linear_key_head_dim", 128),
        ("monkey", "banana"),
        ("eval_interval", 5),
    ],
)
def test_harmless_names_are_kept(name: str, value: Any) -> None:
    assert redacted({name: value}) == {name: value}


def test_password_and_singular_names_are_secret_even_as_numbers() -> None:
    assert redacted({"db_password": 1234, "judge_token": 5678}) == {"db_password": REDACTED, "judge_token": REDACTED}


def test_environment_variables_keep_their_names_only() -> None:
    options = {"train_env_vars": {"PATH_TO_JUDGE": "x", "N": 3}, "judge": {"env": {"A": "b"}}}
    assert redacted(options) == {
        "train_env_vars": {"PATH_TO_JUDGE": REDACTED, "N": REDACTED},
        "judge": {"env": {"A": REDACTED}},
    }


def test_words_of_a_command_line() -> None:
    words = ["--log-level", "info", "--ssl-keyfile-password", "p", "--api-keys", "a", "b", "--max-total-tokens", "9"]
    wanted = ["--log-level", "info", "--ssl-keyfile-password", REDACTED, "--api-keys", REDACTED, REDACTED]
    assert redacted({"sglang_cli": words}) == {"sglang_cli": [*wanted, "--max-total-tokens", "9"]}
    assert redacted({"router_cli": ["--api-key=k", "--x=y"]}) == {"router_cli": [f"--api-key={REDACTED}", "--x=y"]}


def test_what_holds_keys_shows_none() -> None:
    """A traceback or a log may show it."""
    plan = EnginePlan(Namespace(judge_token="s3cret"), 0, ("s3cret", "s3cret"), [])
    for holder in (plan, EngineAddress("http://127.0.0.1:1", 1, "s3cret", "s3cret")):
        assert "s3cret" not in repr(holder)


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("--train-env-vars", '{"HF_TOKEN": "s3cret", "N": 1}', '{"HF_TOKEN": "<redacted>", "N": "<redacted>"}'),
        ("--judge", '{"url": "http://j", "api_key": "s3cret"}', '{"url": "http://j", "api_key": "<redacted>"}'),
        (
            "--rm-sglang-args",
            "--tp-size 1 --ssl-keyfile-password s3cret",
            "--tp-size 1 --ssl-keyfile-password <redacted>",
        ),
        ("--rm-url", "http://me:s3cret@judge.example/score", "http://me:<redacted>@judge.example/score"),
        (
            "--rm-url",
            "https://judge.example/s?n=1&api_key=s3cret&x=2",
            "https://judge.example/s?n=1&api_key=<redacted>&x=2",
        ),
        ("--rm-url", "https://judge.example/s?token=s3cret", "https://judge.example/s?token=<redacted>"),
    ],
)
def test_secrets_within_a_text(name: str, text: str, shown: str) -> None:
    """As on a command line, by its flag with and without =, and as an option."""
    assert redacted_words(["x", name, text, "--lr", "1"]) == ["x", name, shown, "--lr", "1"]
    assert redacted_words([f"{name}={text}"]) == [f"{name}={shown}"]
    option = name[2:].replace("-", "_")
    assert redacted({option: text}) == {option: shown}


@pytest.mark.parametrize(
    "text",
    [
        '{"enable_thinking": false}',
        "{not json",
        "--a b",
        "--tp-size 2",
        "http://h:1/x?key_of=1",
        "a@b:c",
        "{}",
        "",
        "{x} --y z",
    ],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert redacted({"value": text}) == {"value": text}
    assert redacted_words(["--value", text]) == ["--value", text]
