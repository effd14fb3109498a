"""What counts as a secret among options, and what only sounds like one."""

from __future__ import annotations

import argparse
import contextlib
import secrets
from argparse import Namespace
from typing import Any, cast

import pytest

from slime.agent.gateway import Gateway
from slime.agent.session import Session
from slime.entry.arguments import assemble
from slime.options.flags.parser import StrictParser
from slime.options.flags.sglang import PassThrough
from slime.ray.engine_actor import EnginePlan
from slime.utils.redaction import REDACTED, is_secret, redacted, redacted_line, redacted_words
from slime.weights import EngineAddress

NUM_GPUS = 0
SECRETS = """
WANDB_API_KEY HF_TOKEN AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID wandb_key sglang_router_api_key api_keys judge_secret
sglang_ssl_keyfile_password openai-api-key apiKey accessToken token key judge_credentials db_passwd secret_of_judge
bearer_token_value Authorization Proxy-Authorization bearer judge_bearer cookie Set-Cookie judge_pwd pwd db_pass
judge_auth auth github_pat sig signature X-Amz-Signature judgeToken sessionKey
"""
SECRET_OPTIONS = "wandb_key sglang_ssl_keyfile_password router_oracle_password"
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
        ("use_token", "true"),
        ("judge_key", "0"),
        ("google_application_credentials", __file__),
        ("PWD", "/nowhere"),
        ("GPG_KEY", "7169"),
        ("pattern", "x"),
        ("author", "x"),
        ("auth_mode", "token"),
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


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 20_000])
def test_of_what_is_nested_too_deeply_nothing_is_shown(text: str) -> None:
    assert redacted_words(["--x", text, f"--y={text}"]) == ["--x", REDACTED, f"--y={REDACTED}"]


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
        ("--rm-url", "http://me:s3cret@judge.example/score", "http://<redacted>@judge.example/score"),
        ("--rm-url", "https://s3cret@judge.example/score", "https://<redacted>@judge.example/score"),
        ("--rm-url", "https://u:s3cr@et@h:1/a@b?c=d@e", "https://<redacted>@h:1/a@b?c=d@e"),
        ("--urls", "ftp://a:s3cret@h ftp://b:s3cret@i", "ftp://<redacted>@h ftp://<redacted>@i"),
        ("--rm-url", "https://blob/x?se=1&sig=s3cret&sp=r", "https://blob/x?se=1&sig=<redacted>&sp=r"),
        ("--rm-url", "https://s3/x?X-Amz-Signature=s3cret", "https://s3/x?X-Amz-Signature=<redacted>"),
        ("--rm-url", "https://h/cb#access_token=s3cret", "https://h/cb#access_token=<redacted>"),
        ("--judge-headers", '{"Authorization": "Bearer s3cret"}', '{"Authorization": "<redacted>"}'),
        ("--judges", '[{"url": "u", "pwd": "s3cret"}]', '[{"url": "u", "pwd": "<redacted>"}]'),
        ("--judge-header", "Authorization: Bearer s3cret", "Authorization: <redacted>"),
        ("--judge-header", "X-Api-Key: s3cret", "X-Api-Key: <redacted>"),
        ("--judge-header", "Cookie: a=s3cret; b=s3cret", "Cookie: <redacted>"),
        ("--judge-variable", "JUDGE_TOKEN=s3cret", "JUDGE_TOKEN=<redacted>"),
        ("--judge-header", "X-Judge: bearer s3cret", "X-Judge: bearer <redacted>"),
        ("--judge-header", "X-Judge: Basic dXNlcjpwYXNz", "X-Judge: Basic <redacted>"),
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
        "You have basic knowledge of algebra. Basic English, please.",
        "https://h/a@b",
        "https://h?to=a@b",
        "key: /",
        "input_key=question",
        "[1, 2]",
        "10.0.0.1:8000",
    ],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert redacted({"value": text}) == {"value": text}
    assert redacted_words(["--value", text]) == ["--value", text]


def test_of_the_options_there_are_only_those_that_are_secrets_sound_like_one() -> None:
    """Of the installed Megatron's, SGLang's and router's too; each with a value of its type, or that may be a count."""
    parser = StrictParser(prog="x")
    assemble(parser)
    values = {action.dest: _value_of(action) for action in parser._actions}
    assert len(values) > 800
    assert {name for name, value in values.items() if is_secret(name, value)} == set(SECRET_OPTIONS.split())
    assert is_secret("router_control_plane_api_keys", ["a:b:admin:c"])


def _value_of(action: argparse.Action) -> Any:
    if action.nargs == 0:
        return True
    for word in ("1234", "0.5", "text"):
        with contextlib.suppress(ValueError, TypeError, argparse.ArgumentTypeError):
            value = action.type(word) if callable(action.type) else word
            return value if action.type or isinstance(action, PassThrough) else "text"
    return "text"


def test_an_agents_session_is_not_told_by_its_url() -> None:
    """As aiohttp's errors have it, of an agent that was refused."""
    key = Gateway().open_session(cast(Session, None))
    line = f"503, message='Service Unavailable', url='http://192.0.2.1:8000/sessions/{key}/v1/chat/completions'"
    assert redacted_line(line) == line.replace(key, REDACTED)
