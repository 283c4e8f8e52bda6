"""Tests files of records: parsing, errors with their location, and the split of dialogues."""

import json
from pathlib import Path
from typing import Any

import pytest

from flax_models.data.corpus import HELD_OUT_SHARE, load_corpus
from flax_models.data.dialogue import Dialogue, Document, Turn, in_batches, plain_prompt
from flax_models.data.records import read_records
from flax_models.errors import RunError

ALPACA = {"instruction": "Which colour is it?", "input": "snow", "output": "White."}
PAIR = {"prompt": "2 + 2 =", "completion": " 4"}
CHAT = {
    "messages": [
        {"role": "system", "content": ""},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "no"},
    ]
}


def write(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (record if isinstance(record, str) else json.dumps(record, ensure_ascii=False) for record in records)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def pairs(count: int, size: int = 1) -> list[dict[str, str]]:
    return [{"prompt": f"question {i}", "completion": f" answer {i}" * size} for i in range(count)]


def dialogues(path: Path) -> list[Dialogue]:
    return read_records(path, path.read_text(encoding="utf-8"), path.name).dialogues


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        (ALPACA, [("instruction", "Which colour is it?"), ("input", "snow"), ("output", "White.")]),
        ({**ALPACA, "input": ""}, [("instruction", "Which colour is it?"), ("output", "White.")]),
        ({**ALPACA, "input": None}, [("instruction", "Which colour is it?"), ("output", "White.")]),
        ({"instruction": "a", "output": "b"}, [("instruction", "a"), ("output", "b")]),
        (PAIR, [("prompt", "2 + 2 ="), ("completion", " 4")]),
        (
            CHAT,
            [("system", ""), ("user", "hi"), ("assistant", "hello"), ("user", "more"), ("assistant", "no")],
        ),
        (
            {"messages": [*CHAT["messages"], {"role": "user", "content": "thanks"}]},
            [tuple(m.values()) for m in CHAT["messages"]],
        ),
        (
            {**ALPACA, "text": "all of it"},
            [("instruction", "Which colour is it?"), ("input", "snow"), ("output", "White.")],
        ),
        ({**CHAT, "prompt": "hi"}, [tuple(m.values()) for m in CHAT["messages"]]),
    ],
)
def test_fields_determine_the_kind_of_a_record(tmp_path, record, turns):
    (found,) = dialogues(write(tmp_path / "a.jsonl", record))
    assert found == Dialogue("a.jsonl:1", tuple(Turn(*turn) for turn in turns))


def test_lines_are_counted_whatever_ends_or_separates_them(tmp_path):
    odd = {"prompt": "a\u2028b\x85c\r\n", "completion": "d\x0ce"}
    first, second = json.dumps(odd, ensure_ascii=False), json.dumps(PAIR)
    path = tmp_path / "a.jsonl"
    path.write_bytes(f"\ufeff{first}\r\n\r\n \n{second}".encode())
    found = dialogues(path)
    assert [dialogue.name for dialogue in found] == ["a.jsonl:1", "a.jsonl:4"]
    assert found[0].turns == (Turn("prompt", odd["prompt"]), Turn("completion", odd["completion"]))


def test_a_list_in_a_json_file_holds_records_too(tmp_path):
    path = tmp_path / "alpaca.json"
    path.write_text("\ufeff" + json.dumps([ALPACA, {**ALPACA, "output": "Blue."}], indent=2), encoding="utf-8")
    found = dialogues(path)
    assert [(dialogue.name, dialogue.turns[-1].content) for dialogue in found] == [
        ("alpaca.json:1", "White."),
        ("alpaca.json:2", "Blue."),
    ]


def test_texts_in_lines_are_treated_as_text_files(tmp_path):
    texts = [{"text": f"line one of {i}\n" * 9 + "the end\n"} for i in range(12)]
    lines = load_corpus([write(tmp_path / "a.jsonl", *texts, {"text": " \n"})])
    for i, text in enumerate(texts):
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / "files" / f"{i}.txt").write_text(text["text"])
    files = load_corpus([tmp_path / "files"])
    assert sorted(d.text for d in (*lines.train, *lines.held_out)) == sorted(
        d.text for d in (*files.train, *files.held_out)
    )
    assert "a.jsonl:3" in {document.name for document in (*lines.train, *lines.held_out)}
    assert lines.notes == ("1 empty records skipped",)
    few = load_corpus([write(tmp_path / "few.jsonl", *texts[:2])])
    assert [document.name for document in few.train] == [document.name for document in few.held_out]
    assert few.train[0].text + few.held_out[0].text == texts[0]["text"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a"'], r"a\.jsonl:1 is not JSON: "),
        (["[" * 100_000], r"a\.jsonl:1 is not JSON: "),
        ([PAIR, "", [1]], r"a\.jsonl:3 must be an object, got list"),
        ([{}], r"a\.jsonl:1: a record must have messages, or instruction and output, or .*, got the fields \(none\)"),
        ([{"question": "a", "answer": "b"}], r"a\.jsonl:1: a record must have .*, got the fields answer, question"),
        ([{"instruction": "a"}], r"a\.jsonl:1: a record must have .*, got the fields instruction$"),
        ([ALPACA, PAIR], r"a\.jsonl:2 has the fields completion, prompt, but .*a\.jsonl:1 has instr"),
        (
            [PAIR, {"text": "a"}],
            r"a\.jsonl:2 has the fields text, but .* has prompt and completion",
        ),
        ([{"text": 5}], r"a\.jsonl:1: text must be a string, got int"),
        ([{"text": None}], r"a\.jsonl:1: text must be a string, got null"),
        ([{**ALPACA, "output": " \n"}], r"a\.jsonl:1: output is an answer and must not be empty"),
        ([{**ALPACA, "input": ["snow"]}], r"a\.jsonl:1: input must be a string, got list"),
        ([{**PAIR, "completion": ""}], r"a\.jsonl:1: completion is an answer and must not be empty"),
        (['{"prompt": "\\ud83d", "completion": "a"}'], r"a\.jsonl:1: prompt has an unpaired surrogate"),
        ([{"messages": "hi"}], r"a\.jsonl:1: messages must be a list, got str"),
        ([{"messages": []}], r"a\.jsonl:1: messages must have an assistant turn, got 0 other turns"),
        ([{"messages": CHAT["messages"][:2]}], r"messages must have an assistant turn, got 2 other turns"),
        ([{"messages": ["hi"]}], r"a\.jsonl:1: messages\[0\] must be an object, got str"),
        ([{"messages": [{"from": "human"}]}], r"a\.jsonl:1: messages\[0\]\.role must be a string, got null"),
        ([{"messages": [{"role": "gpt", "content": ""}]}], r"messages\[0\]\.role must be one of system, .*, got 'gpt'"),
        ([{"messages": [{"role": "user", "content": [{}]}]}], r"messages\[0\]\.content must be a string, got list"),
        ([{"messages": [{"role": "assistant", "content": ""}]}], r"messages\[0\]\.content is an answer and must not"),
        ([{"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}], r"messages\[0\] has tool_calls"),
    ],
)
def test_errors_name_the_line(tmp_path, lines, message):
    with pytest.raises(RunError, match=message) as caught:
        dialogues(write(tmp_path / "a.jsonl", *lines))
    assert str(caught.value).startswith(f"--data: {tmp_path}")
    assert "\n" not in str(caught.value)


def test_errors_in_a_list_name_the_position(tmp_path):
    for text, message in [
        ("{}", r"a\.json must hold a list of objects, got dict"),
        ("[", r"a\.json is not JSON: "),
        (json.dumps([PAIR, 5]), r"a\.json, object 2 must be an object, got int"),
        (json.dumps([PAIR, {**PAIR, "completion": 5}]), r"a\.json, object 2: completion must be a string, got int"),
    ]:
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(RunError, match=message):
            load_corpus([tmp_path / "a.json"])


def test_unused_fields_and_duplicate_records_are_reported(tmp_path):
    tagged = {"messages": [{**CHAT["messages"][1], "name": "Ann"}, CHAT["messages"][2]], "id": 7}
    path = write(tmp_path / "a.jsonl", tagged, {**tagged, "id": 8, "source": "x"}, CHAT)
    assert load_corpus([path]).notes == ("unused fields: id, messages.name, source", "1 duplicate records")
    many = {**PAIR, **dict.fromkeys("efghij", 0)}
    assert load_corpus([write(path, many, PAIR, *pairs(3))]).notes[0].endswith(" and 2 more")
    assert load_corpus([write(path, *pairs(3))]).notes == ()


def test_texts_and_dialogues_are_not_mixed(tmp_path):
    write(tmp_path / "data" / "a.jsonl", *pairs(3))
    (tmp_path / "data" / "notes.txt").write_text("some text\n")
    with pytest.raises(
        RunError,
        match=r"got both: notes\.txt is a text and a\.jsonl:1 is a dialogue",
    ):
        load_corpus([tmp_path / "data"])


def test_a_folder_reads_jsonl_files_as_records_and_json_files_as_text(tmp_path):
    write(tmp_path / "data" / "b" / "chat.jsonl", CHAT, CHAT)
    write(tmp_path / "data" / "a.jsonl", *pairs(2))
    corpus = load_corpus([tmp_path / "data"])
    assert {record.name for record in (*corpus.train, *corpus.held_out)} == {
        *(f"a.jsonl:{i}" for i in (1, 2)),
        *(f"b/chat.jsonl:{i}" for i in (1, 2)),
    }
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "package.json").write_text('{"name": "x"}\n')
    assert isinstance(load_corpus([tmp_path / "texts"]).train[0], Document)


def test_whole_dialogues_are_held_out_by_name(tmp_path):
    first = load_corpus([write(tmp_path / "a" / "x.jsonl", *pairs(200))])
    again = load_corpus([write(tmp_path / "b" / "x.jsonl", *pairs(200))])
    assert (first.train, first.held_out, first.sha256) == (again.train, again.held_out, again.sha256)
    assert len(first.train) + len(first.held_out) == 200
    assert HELD_OUT_SHARE / 2 < len(first.held_out) / 200 < 2 * HELD_OUT_SHARE
    assert not {d.name for d in first.train} & {d.name for d in first.held_out}
    longer = load_corpus([write(tmp_path / "a" / "x.jsonl", *pairs(199), {**PAIR, "completion": "4 " * 10_000})])
    assert "x.jsonl:200" in {dialogue.name for dialogue in longer.train}


def test_one_of_few_dialogues_is_held_out_and_a_single_one_raises(tmp_path):
    corpus = load_corpus([write(tmp_path / "a.jsonl", *pairs(2))])
    assert (len(corpus.train), len(corpus.held_out)) == (1, 1)
    with pytest.raises(RunError, match=r"--data must have at least two records, .* got only a\.jsonl:1"):
        load_corpus([write(tmp_path / "a.jsonl", PAIR)])
    with pytest.raises(RunError, match=r"no text found in .*a\.jsonl"):
        load_corpus([write(tmp_path / "a.jsonl", "")])


def test_the_hash_sees_every_turn_and_where_it_ends(tmp_path):
    hashes = set()
    for record in (PAIR, {"prompt": "2 + 2 = ", "completion": "4"}, {"prompt": "2 + 2 =", "completion": "4"}, CHAT):
        hashes.add(load_corpus([write(tmp_path / "a.jsonl", record, record)]).sha256)
    assert len(hashes) == 4


def test_a_dialogue_reads_as_plain_text_and_as_messages(tmp_path):
    alpaca, chat = (dialogues(write(tmp_path / "a.jsonl", record))[0] for record in (ALPACA, CHAT))
    assert alpaca.text == ("### Instruction:\nWhich colour is it?\n\n### Input:\nsnow\n\n### Response:\nWhite.")
    assert alpaca.messages() == [
        {"role": "user", "content": "Which colour is it?\n\nsnow"},
        {"role": "assistant", "content": "White."},
    ]
    assert [piece.answer for piece in chat.pieces()] == ["hello", "no"]
    assert chat.pieces()[0].prompt == "### System:\n\n\n### Instruction:\nhi\n\n### Response:\n"
    assert chat.messages() == CHAT["messages"]
    assert (alpaca.answers, chat.answers) == (1, 2)
    assert plain_prompt("hi") == "### Instruction:\nhi\n\n### Response:\n"


def test_batches_hold_every_record_once_in_order():
    documents = [Document(str(i), "a" * (i * 200_000)) for i in range(12)]
    batches = list(in_batches(documents))
    assert [document for batch in batches for document in batch] == documents
    assert 3 < len(batches) < 12
    assert not list(in_batches([]))
