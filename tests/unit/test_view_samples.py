"""tools/view_samples.py: reading files, lists and filters, a sample's tokens, the server, and its errors."""

from __future__ import annotations

import copy
import datetime
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.data import Sample
from slime.rollout.tokenizer import load_tokenizer
from slime.utils.errors import BadInputError
from tests.saved_rollouts import HOSTILE, make_samples, write_rollout, write_train_data
from tests.served import get, served
from tools import make_tiny_model, view_samples
from tools.samples.library import PAGE, Library
from tools.samples.rollouts import Query, Rollout, list_samples, question, read_rollout, show_sample, token_texts
from tools.samples.safe_files import load_safe
from tools.web.server import Server

NUM_GPUS = 0


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tiny_model.make_tokenizer(320)


@pytest.fixture
def samples(tokenizer: Any) -> list[Sample]:
    return make_samples(tokenizer)


@pytest.fixture
def rollout(samples: list[Sample], tmp_path: Path) -> Rollout:
    return read_rollout(write_rollout(tmp_path / "7.pt", 7, samples))


def places(rollout: Rollout, **values: str) -> list[int]:
    return [row["place"] for row in list_samples(rollout, Query.parse(values))["rows"]]


# ---- files ----


def test_a_file_gives_back_the_samples_that_were_saved(samples: list[Sample], rollout: Rollout) -> None:
    assert rollout.rollout_id == 7
    assert [json.dumps(s.to_dict()) for s in rollout.samples] == [json.dumps(s.to_dict()) for s in samples]


def test_a_file_reads_as_with_weights_only(tmp_path: Path) -> None:
    content = {"a": [1, 2.5, None, "x", b"y", (True,), {"z", 1}, 2 + 1j], "deep": {"d": [{}]}}
    tensors = [torch.arange(6).to(kind).view(2, 3)[:, 1:] for kind in (torch.bfloat16, torch.int64, torch.uint16)]
    torch.save({**content, "tensors": tensors}, tmp_path / "f.pt")
    for loaded in (load_safe(tmp_path / "f.pt"), torch.load(tmp_path / "f.pt", weights_only=True)):
        assert [(t.dtype, t.tolist()) for t in loaded.pop("tensors")] == [(t.dtype, t.tolist()) for t in tensors]
        assert loaded == content


class Marker:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("new_format", [True, False])
def test_no_code_of_a_file_is_run(tmp_path: Path, new_format: bool) -> None:
    content = {"samples": [Marker(tmp_path / "touched")]}
    torch.save(content, tmp_path / "f.pt", _use_new_zipfile_serialization=new_format)
    with pytest.raises(BadInputError, match=r"f\.pt: not a file of saved samples"):
        load_safe(tmp_path / "f.pt")
    assert not (tmp_path / "touched").exists()
    torch.load(tmp_path / "f.pt", weights_only=False)
    assert (tmp_path / "touched").exists()


def test_an_object_in_a_file_is_named(tmp_path: Path) -> None:
    torch.save({"samples": [datetime.date(2000, 1, 1)]}, tmp_path / "f.pt")
    with pytest.raises(BadInputError, match=r"it holds a datetime\.date; only plain values"):
        load_safe(tmp_path / "f.pt")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([1], "no list 'samples'"),
        ({"samples": {}}, "no list 'samples'"),
        ({"samples": [{"response": "x"}]}, "sample 0: it has no tokens"),
        ({"samples": [{"tokens": ["x"]}]}, "sample 0: its tokens are not a list of token ids"),
        ({"samples": [{"tokens": [-1]}]}, "sample 0: its tokens are not a list of token ids"),
        ({"samples": [{"tokens": [1]}, {"tokens": [1], "response_length": 2}]}, "sample 1: response_length 2 of 1"),
        ({"samples": [{"tokens": [1], "status": "x"}]}, "sample 0: 'x' is not a valid Status"),
        ({"samples": [{"tokens": [1], "group_index": [1]}]}, "sample 0: group_index"),
    ],
)
def test_what_is_no_rollout_says_why(tmp_path: Path, content: Any, complaint: str) -> None:
    torch.save(content, tmp_path / "f.pt")
    with pytest.raises(BadInputError, match=rf"f\.pt: not a rollout's file: .*{re.escape(complaint)}"):
        read_rollout(tmp_path / "f.pt")


def test_columns_may_be_tensors(samples: list[Sample], tmp_path: Path) -> None:
    values = samples[1].to_dict()
    changed: dict[str, Any] = {name: torch.tensor(values[name]) for name in ("tokens", "loss_mask")}
    changed["rollout_log_probs"] = {"__numpy_array__": torch.tensor(values["rollout_log_probs"])}
    torch.save({"samples": [{**values, **changed}]}, tmp_path / "f.pt")
    shown = show_sample(read_rollout(tmp_path / "f.pt"), 0, None)
    assert shown["tokens"] == samples[1].tokens
    assert shown["columns"]["rollout_log_probs"] == samples[1].rollout_log_probs
    assert json.dumps(shown)


# ---- lists ----


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"status": "truncated"}, [2]),
        ({"group": "1"}, [2, 3]),
        ({"removed": "1"}, [3]),
        ({"versions": "1"}, [1]),
        ({"reward_min": "0.5"}, [0, 1, 4, 7]),
        ({"reward_max": "0.25"}, [2, 3]),
        ({"reward_min": "0.25", "reward_max": "0.5"}, [1, 3]),
        ({"text": "EIGHT"}, [7]),
        ({"text": "6+1="}, [6]),
        ({"text": "onerror", "status": "completed"}, [4]),
        ({"sort": "reward"}, [2, 3, 1, 7, 0, 4, 5, 6]),
        ({"sort": "reward", "descending": "1"}, [0, 4, 7, 1, 3, 2, 5, 6]),
        ({"sort": "length", "descending": "1", "limit": "2"}, [4, 1]),
        ({"offset": "3", "limit": "2"}, [3, 4]),
        ({"offset": "100"}, []),
    ],
)
def test_filters_order_and_pages(rollout: Rollout, values: dict[str, str], expected: list[int]) -> None:
    assert places(rollout, **values) == expected


@pytest.mark.parametrize(
    "values", [{"colour": "red"}, {"group": "x"}, {"reward_min": "x"}, {"sort": "x"}, {"limit": "0"}, {"offset": "-1"}]
)
def test_a_wrong_filter_is_an_error(values: dict[str, str]) -> None:
    with pytest.raises(BadInputError, match=next(iter(values))):
        Query.parse(values)


def test_a_list_counts_the_whole_rollout_and_shows_a_page(rollout: Rollout) -> None:
    page = list_samples(rollout, Query.parse({"status": "completed", "limit": "2"}))
    assert (page["total"], page["matched"], page["groups"], len(page["rows"])) == (8, 6, 4, 2)
    assert page["statuses"] == {"completed": 6, "truncated": 1, "failed": 1}
    assert page["rewards"] == [0.0, pytest.approx(3.5 / 6), 1.0]
    first, second = page["rows"]
    assert (first["reward"], first["group_mean"], second["group_mean"]) == (1.0, 0.75, 0.75)
    assert (second["length"], second["trained"], second["versions"]) == (13, 8, ["3", "4"])
    assert "tokens" not in first
    assert list_samples(rollout, Query.parse({"text": "four"}))["rows"][0]["trained"] == 0


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n",
        "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n",
        "[gMASK]<sop><|system|>\nS<|user|>\nWhat?<|assistant|>\n<think>",
        "<\uff5cbegin▁of▁sentence\uff5c>S<\uff5cUser\uff5c>What?<\uff5cAssistant\uff5c><think>\n",
        "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWhat?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n<think>",
        "<bos><start_of_turn>user\nWhat?<end_of_turn>\n<start_of_turn>model\n",
        "<s>[INST] What? [/INST]",
        "<|im_user|>user<|im_middle|>What?<|im_end|><|im_assistant|>assistant<|im_middle|>",
        "<|start|>system<|message|>S<|end|><|start|>user<|message|>What?<|end|><|start|>assistant",
        "What?",
        [{"role": "system", "content": "S"}, {"role": "user", "content": "What?"}],
        [{"role": "user", "content": [{"type": "text", "text": "What?"}]}],
    ],
)
def test_a_list_shows_the_question(prompt: Any) -> None:
    assert question(Sample(prompt=prompt)) == "What?"


@pytest.mark.parametrize(
    "prompt", ["user\nof what", "", "<|im_start|><|im_end|>", HOSTILE, "a < b | c > d", "<|x|>", "user"]
)
def test_a_prompt_without_turns_is_shown_as_it_is(prompt: str) -> None:
    assert question(Sample(prompt=prompt)) == prompt


def test_the_page_says_order_and_colours_in_usual_words() -> None:
    page = PAGE.read_text()
    assert "> descending<" in page
    assert ">file order<" in page
    assert "falling" not in page


@pytest.mark.parametrize("mark", ["<|im_start|>user\n", "<|user|>"])
def test_hostile_questions_stay_text(mark: str, tokenizer: Any, tmp_path: Path) -> None:
    """What a list shows of a prompt is the prompt's own text: JSON that the page puts into text nodes."""
    sample = Sample(prompt=f"{mark}{HOSTILE}<|im_end|>", tokens=[1], response_length=1, response=HOSTILE)
    row = list_samples(read_rollout(write_rollout(tmp_path / "1.pt", 1, [sample])), Query())["rows"][0]
    assert row["prompt"] == HOSTILE
    assert json.loads(json.dumps(row)) == row


def test_rewards_may_be_dicts(samples: list[Sample], tmp_path: Path) -> None:
    for place, sample in enumerate(samples):
        sample.reward = {"acc": place, "format": -place, "why": "text"}
    rollout = read_rollout(write_rollout(tmp_path / "7.pt", 7, samples))
    assert list_samples(rollout, Query())["reward_keys"] == ["acc", "format"]
    assert list_samples(rollout, Query())["reward_key"] == "acc"
    assert places(rollout, reward_min="6") == [6, 7]
    assert places(rollout, reward_key="format", reward_min="-1") == [0, 1]
    assert places(rollout, reward_key="why", reward_min="0") == []


# ---- one sample ----


def test_a_sample_has_its_tokens_in_columns(rollout: Rollout, tokenizer: Any) -> None:
    shown = show_sample(rollout, 1, tokenizer)
    response = shown["texts"][shown["start"] :]
    assert "".join(response) == "two echo\ndone"
    assert shown["columns"]["loss_mask"] == [1] * 4 + [0] * 5 + [1] * 4
    assert shown["columns"]["version"] == ["3"] * 4 + [None] * 5 + ["4"] * 4
    assert shown["columns"]["rollout_log_probs"][:3] == [0.0, -0.125, -0.25]
    assert "".join(shown["texts"][: shown["start"]]).startswith("<|im_start|>user\n1+1=")
    assert shown["special"] == sorted(tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]))
    assert shown["fields"]["label"] == "2"
    assert shown["problem"] is None
    assert show_sample(rollout, 1, None)["texts"] is None


def test_a_sample_is_json_whatever_it_holds(samples: list[Sample], tmp_path: Path) -> None:
    samples[0].metadata = {
        "nan": float("nan"),
        3: {"long": torch.zeros(1000)},
        "short": torch.ones(2),
        "b": b"x",
        "s": {1},
    }
    samples[0].rollout_log_probs = [float("-inf")] * samples[0].response_length
    shown = show_sample(read_rollout(write_rollout(tmp_path / "7.pt", 7, samples)), 0, None)
    again = json.loads(json.dumps(shown, allow_nan=False))
    long = "tensor of torch.float32, shape [1000]"
    expected = {"nan": "nan", "3": {"long": long}, "short": [1.0, 1.0], "b": "b'x'", "s": [1]}
    assert again["fields"]["metadata"] == expected
    assert again["columns"]["rollout_log_probs"][0] == "-inf"


def test_a_column_of_another_length_is_left_out_and_named(samples: list[Sample], tmp_path: Path) -> None:
    samples[0].loss_mask = [1]
    shown = show_sample(read_rollout(write_rollout(tmp_path / "7.pt", 7, samples)), 0, None)
    assert "loss_mask" not in shown["columns"]
    assert shown["problem"].startswith("sample 0: loss_mask has 1 entries for")


@pytest.mark.parametrize("place", [-1, 8])
def test_a_sample_that_is_not_there(rollout: Rollout, place: int) -> None:
    with pytest.raises(BadInputError, match=f"no sample {place}: the rollout has 8"):
        show_sample(rollout, place, None)


def test_a_character_of_several_tokens_is_shown_once(tokenizer: Any) -> None:
    text = "é 你\U0001f600<|im_end|>\n"
    texts = token_texts(tokenizer.decode, tokenizer(text)["input_ids"])
    assert texts == [None, "é", " ", None, None, "你", None, None, None, "\U0001f600", "<|im_end|>", "\n"]


def test_bytes_that_are_no_character_hold_nothing_up(tokenizer: Any) -> None:
    e_acute = tokenizer("é")["input_ids"]
    texts = token_texts(
        tokenizer.decode, [*tokenizer("a")["input_ids"], *[e_acute[0]] * 20, *tokenizer("b")["input_ids"]]
    )
    assert len(texts) == 22
    assert texts[0] == "a"
    assert "".join(t or "" for t in texts[1:]).strip("\ufffd") == "b"
    assert token_texts(tokenizer.decode, e_acute[:1]) == ["\ufffd"]


# ---- the trainer's data ----


def test_the_trainers_log_probs_stand_beside_the_engines(samples: list[Sample], tmp_path: Path) -> None:
    parts = [copy.deepcopy(samples[1]) for _ in range(2)]  # a rollout cut in two: one index, other tokens
    parts[1].tokens[0] += 1
    files = [
        write_train_data(tmp_path / "train_data" / "7_0.pt", 7, [samples[0], parts[1]], 0.25),
        write_train_data(tmp_path / "train_data" / "7_1.pt", 7, [parts[0], samples[3]], 0.5),
        write_train_data(tmp_path / "train_data" / "8_7.pt", 8, [samples[2]], 0.5),
    ]
    path = write_rollout(tmp_path / "7.pt", 7, [samples[0], *parts, samples[2], samples[3]])
    rollout = read_rollout(path, files)
    page = list_samples(rollout, Query.parse({"sort": "gap", "descending": "1"}))
    assert page["train"]
    assert [(row["place"], row["gap"]) for row in page["rows"]] == [(1, 0.5), (4, 0.5), (0, 0.25), (2, 0.25), (3, None)]
    shown = show_sample(rollout, 1, None)
    assert set(shown["train"]) == {"log_probs", "advantages"}
    assert shown["train"]["log_probs"][:2] == [0.5, 0.375]
    assert show_sample(rollout, 3, None)["train"] == {}
    assert not list_samples(read_rollout(path), Query())["train"]


def test_what_is_no_training_ranks_file_says_so(samples: list[Sample], tmp_path: Path) -> None:
    path = write_rollout(tmp_path / "7.pt", 7, samples)
    with pytest.raises(BadInputError, match=r"7\.pt: not a training rank's file"):
        read_rollout(path, [path])


# ---- the server ----


@pytest.fixture
def dump(samples: list[Sample], tmp_path: Path, tokenizer: Any) -> Path:
    """The directory of ``--dump-details``, with a tokenizer."""
    for rollout_id in (2, 10):
        write_rollout(tmp_path / "dump" / "rollout_data" / f"{rollout_id}.pt", rollout_id, samples)
    write_train_data(tmp_path / "dump" / "train_data" / "10_0.pt", 10, samples, 0.25)
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "dump"


@pytest.fixture
def server(dump: Path) -> Iterator[Server]:
    with served(Library([dump], [], lambda: load_tokenizer(str(dump.parent / "model")))) as server:
        yield server


def test_the_server_answers_with_json(server: Server) -> None:
    assert get(server, "/api/rollouts")[2] == {"names": ["2.pt", "10.pt"]}
    _, headers, page = get(server, "/api/samples", rollout="10.pt", text="onerror")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert [row["gap"] for row in page["rows"]] == [pytest.approx(0.25)]
    shown = get(server, "/api/sample", rollout="2.pt", place=4)[2]
    assert shown["fields"]["response"] == HOSTILE
    assert "".join(text or "" for text in shown["texts"][shown["start"] :]) == HOSTILE


def test_rollouts_and_train_data_that_come_later_are_shown(server: Server, dump: Path, samples: list[Sample]) -> None:
    assert not get(server, "/api/samples", rollout="2.pt")[2]["train"]
    write_rollout(dump / "rollout_data" / "11.pt", 11, samples)
    write_train_data(dump / "train_data" / "2_0.pt", 2, samples, 0.25)
    assert get(server, "/api/rollouts")[2]["names"] == ["2.pt", "10.pt", "11.pt"]
    assert get(server, "/api/samples", rollout="2.pt")[2]["train"]


@pytest.mark.parametrize(
    ("path", "values", "complaint"),
    [
        ("/api/samples", {}, "there is no rollout ''"),
        ("/api/samples", {"rollout": "../../model/tokenizer.json"}, "there is no rollout"),
        ("/api/samples", {"rollout": "2.pt", "sort": "x"}, "sort is one of"),
        ("/api/sample", {"rollout": "2.pt", "place": "x"}, "place='x' is not a number"),
        ("/api/sample", {"rollout": "2.pt", "place": "99"}, "no sample 99"),
    ],
)
def test_a_wrong_question_gets_an_error(server: Server, path: str, values: dict[str, str], complaint: str) -> None:
    status, _, answer = get(server, path, **values)
    assert status == 400
    assert complaint in answer["error"]


def test_nothing_but_the_page_and_its_data_is_served(server: Server) -> None:
    for path in ("/page.html", "/../view_samples.py", "/api", "/api/rollouts/x"):
        assert get(server, path)[0] == 404


def test_the_page_makes_no_html_of_text_and_takes_nothing_from_elsewhere() -> None:
    page = PAGE.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://|\bon\w+=\"", page)


# ---- the command line ----


def test_errors_are_one_line_and_status_2(
    dump: Path, samples: list[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    file, empty, text = str(dump / "rollout_data" / "2.pt"), dump.parent / "empty", dump.parent / "text.pt"
    empty.mkdir()
    text.write_text("not a rollout")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, complaint in (
            ([str(dump / "none")], "none: no such file or directory"),
            ([file, "--train-data", str(dump / "none")], "none: no such file or directory"),
            ([str(empty)], "no *.pt files of saved rollouts in"),
            ([str(text)], "text.pt: not a file of saved samples"),
            ([file, "--hf-checkpoint", str(empty)], f"--hf-checkpoint {empty}: its tokenizer does not load"),
            ([file, "--hf-checkpoint", "nomodel"], "--hf-checkpoint nomodel: there is no such directory, and a hub id"),
            ([file, "--port", str(port)], f"--port {port}: [Errno 98] Address already in use"),
            ([file, "--port", "70000"], "--port 70000"),
            ([file, "--host", "192.0.2.1"], "--host 192.0.2.1"),
        ):
            assert view_samples.main(arguments) == 2
            output = capsys.readouterr()
            assert output.out == ""
            assert output.err.startswith("view_samples.py: error: ")
            assert output.err.count("\n") == 1
            assert complaint in output.err


def test_files_of_one_name_are_told_apart(dump: Path, samples: list[Sample], tmp_path: Path) -> None:
    other = write_rollout(tmp_path / "other" / "2.pt", 2, samples)
    files = Library([dump, other], [], lambda: None).files()
    assert list(files) == [str(dump / "rollout_data" / "2.pt"), "10.pt", str(other)]
