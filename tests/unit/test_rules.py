"""Rules between options: what each form refuses, its line with values and in plain English, and what rows may name."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.entry.arguments import assemble
from slime.options import lora, training
from slime.options.checks import layout, validate
from slime.options.checks.unheeded import UNHEEDED
from slime.options.errors import OptionError
from slime.options.flags.parser import StrictParser
from slime.options.learning.algorithm import RULES as ALGORITHM
from slime.options.rules import Rule, check, hold
from slime.options.serving import reward_model
from tests.releases import GONE

NUM_GPUS = 0
TABLES = (
    *(ALGORITHM, validate.RULES, training.RULES, layout.RULES, reward_model.RULES),
    *(lora.ADAPTER_SYNC, lora.MERGED_SYNC),
)
DERIVED = {"placement", "asynchronous", "needs_reference", "reward_baseline", "use_critic"}
"""What rows name besides options: `args` has it when they are checked."""


@pytest.mark.parametrize(
    ("rule", "values", "sentence"),
    [
        (Rule("use_tis use_rs", "needs", "loss_type=a|b", ": x"), {"use_tis": True, "use_rs": True, "loss_type": "c"},
         "--use-tis, --use-rs needs --loss-type a or b: x"),
        (Rule("use_tis", "needs", "loss_type=a|b"), {"use_tis": True, "loss_type": "b"}, None),
        (Rule("use_tis", "needs", "use_rs"), {"use_tis": False, "use_rs": False}, None),
        (Rule("kl_coef", "has no effect without", "save save_hf lr!=None"), {"kl_coef": 0.5},
         "--kl-coef 0.5 has no effect without --save, --save-hf or --lr"),
        (Rule("kl_coef", "has no effect with", "loss_type=a use_rs"), {"kl_coef": 1, "use_rs": True},
         "--kl-coef 1 has no effect with --use-rs"),
        (Rule("kl_coef", "has no effect with", "loss_type=a"), {"kl_coef": 1, "loss_type": "b"}, None),
        (Rule("kl_coef>1", "is refused"), {"kl_coef": 1}, None),
        (Rule("kl_coef>1", "is refused", when="!use_rs"), {"kl_coef": 2, "use_rs": True}, None),
        (Rule("kl_coef>1", "is refused", when="!use_rs"), {"kl_coef": 2}, "--kl-coef 2 is refused"),
        (Rule("!hf_checkpoint", "is missing"), {"hf_checkpoint": None}, "--hf-checkpoint is missing"),
        (Rule("@pin_cpu_params", ": no"), {"pin_cpu_params": False, "given_options": ["pin_cpu_params"]},
         "--no-pin-cpu-params: no"),
        (Rule("@pin_cpu_params", ": no"), {"pin_cpu_params": False}, None),
        (Rule("moe_aux_loss_coeff", ": no"), {"moe_aux_loss_coeff": [0.0]}, None),
        (Rule("moe_aux_loss_coeff", ": no"), {"moe_aux_loss_coeff": [0.0, 1.0]}, "--moe-aux-loss-coeff 0.0 1.0: no"),
        (Rule("custom_rm_path", ": no"), {"custom_rm_path": "/x.py:f"}, "--custom-rm-path: no"),
        (Rule("custom_rm_path=/x.py:f", ": no"), {"custom_rm_path": "/x.py:f"}, "--custom-rm-path /x.py:f: no"),
        (Rule("rm_sglang_args!=None", ": no"), {"rm_sglang_args": {"api_key": "k"}}, "--rm-sglang-args: no"),
        (Rule("a b", "is not a multiple of", "c"), {"a": 6, "b": 4, "c": 4}, "--a 6 is not a multiple of --c 4"),
        (Rule("a", "is less than", "c"), {"a": None, "c": 4}, None),
        (Rule("a", "is above", "c"), {"a": 4, "c": 4}, None),
        (Rule("a", "is not before", "c", when="placement=colocate"), {"a": 0, "c": 0, "placement": "colocate"},
         "--a 0 is not before --c 0"),
    ],
)  # fmt: skip
def test_what_a_row_refuses(rule: Rule, values: dict[str, object], sentence: str | None) -> None:
    assert rule.broken(Namespace(**values)) == sentence


def test_a_row_in_plain_english() -> None:
    rule = Rule("kl_coef>0 lr", "needs", "loss_type=a|b save", ": x", when="placement=train_only !use_rs")
    expected = "--kl-coef above 0, --lr needs --loss-type a or b or --save: x"
    assert str(rule) == f"With --debug-train-only and no --use-rs: {expected}"


def test_all_broken_rows_are_told_at_once() -> None:
    rows = (Rule("a", "is refused"), Rule("b", "is refused"), Rule("c", "is refused"))
    with pytest.raises(OptionError, match=r"^--a 1 is refused; --c 3 is refused$"):
        check(Namespace(a=1, b=0, c=3), rows[:2], rows[2:])
    check(Namespace(a=0, b=0, c=0), rows)
    assert hold(Namespace(a=1, b=0), "a !b")


def test_rows_name_options_that_there_are() -> None:
    parser = StrictParser(prog="train.py")
    assemble(parser)
    known = set(parser.actions_by_dest()) | DERIVED
    rows = [rule for table in TABLES for rule in table]
    terms = " ".join([f"{r.options} {r.others} {r.when}" for r in rows] + [f"{u.names} {u.when}" for u in UNHEEDED])
    names = {term.lstrip("!@").replace("!", "=").replace(">", "=").partition("=")[0] for term in terms.split()}
    assert names - known - GONE == {"params_dtype"}
    assert len(rows) > 80
    assert all("  " not in str(rule) for rule in rows)
