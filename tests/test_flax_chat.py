"""Tests chat templates: tokens and answer masks against transformers, prompts, and rejected templates and contents.

transformers marks the text in {% generation %} blocks. It gets each template with these blocks. Our code also gets the
templates without them, and must find the same answers.
"""

import datetime
import json
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_models import import_transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from flax_models.data import template_process, template_worker
from flax_models.data.chat_template import DATE, read_chat_template
from flax_models.data.dialogue import Dialogue, Turn
from flax_models.data.vocabulary import Vocabulary, read_hub_vocabulary
from flax_models.errors import RunError

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<turn>", "</turn>"]
# << and >> stand for {% generation %} and {% endgeneration %}.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}<<{{ m['content'] + '<|im_end|>' }}>>"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for m in loop_messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|head|>' + m.role + '<|/head|>\\n\\n' }}"
    "{% if m.role == 'assistant' %}<<{{ m.content | trim + '<|eot|>' }}>>"
    "{% else %}{{ m.content | trim + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate\\nuser/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}<<{{ ' ' + m.content + eos_token }}>>{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<turn>' + role + '\\n' }}{% if role == 'model' %}<<{{ m.content | trim + '</turn>' }}>>"
    "{% else %}{{ m.content | trim + '</turn>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}"
)
LINES = """{# several lines, where white space around blocks matters #}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        Q: {{ m.content | tojson }}
    {% endif %}
    {%- if m.role == 'assistant' -%}
A:
<<{{ m.content }}{{ eos_token }}>>
    {%- endif %}
    {%- if loop.index0 > 30 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'A:\n' }}{% endif %}"""
PHI = (  # writes a token at the very end, without add_generation_prompt
    "{% for m in messages %}{{ '<|head|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "<<{{ m.content + '<|eot|>' }}>>{% else %}{{ m.content + '<|eot|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
BARE = "{% for m in messages %}{{ m.role + ': ' }}<<{{ m.content }}>>{{ '\\n' }}{% endfor %}"
THINKING = (  # removes the reasoning from all answers except the last, and adds an empty one if the last has none
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role != 'assistant' %}{{ m.content }}"
    "{% else %}{% set parts = m.content.split('</think>') %}{% if loop.last %}"
    "{{ m.content if parts | length > 1 else '<think>\\n\\n</think>\\n\\n' + m.content }}"
    "{% else %}{{ parts[-1].lstrip('\\n') }}{% endif %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "phi": PHI, "lines": LINES}

QUESTION, ANSWER = (
    Turn("user", "Grüße an 👩‍👩‍👧 aus 日本?\r\n\r\nJa: <b>"),
    Turn("assistant", "  Hallo 👋🏽, ça va & so.\nZweite Zeile "),
)
TALK = (QUESTION, ANSWER, Turn("user", "more"), Turn("assistant", "no"))


def marked(template: str) -> str:
    return template.replace("<<", "{% generation %}").replace(">>", "{% endgeneration %}")


def unmarked(template: str) -> str:
    return template.replace("<<", "").replace(">>", "")


TEXT = "Hallo, ça va? Ja: more no user assistant system model Grüße Zeile\n\n" * 3


def of_bytes() -> Tokenizer:
    """Returns a byte-level BPE tokenizer, like those of Llama 3 and Qwen, that prepends <s> to texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    start = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), start])
    return tokenizer


def of_pieces() -> Tokenizer:
    """Returns a tokenizer like those of Llama 2 and Phi-3, with byte fallback and a space marker, also before texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    values = json.loads(tokenizer.to_str())
    entries = values["model"]["vocab"]
    entries |= {f"<0x{byte:02X}>": len(entries) + byte for byte in range(256)}
    values["model"] |= {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    return Tokenizer.from_str(json.dumps(values))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The folders of both tokenizers."""
    found = {}
    for name, tokenizer in (("bytes", of_bytes()), ("pieces", of_pieces())):
        found[name] = tmp_path_factory.mktemp(name)
        import_transformers().PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
        ).save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def folder(folders) -> Path:
    return folders["bytes"]


@pytest.fixture(scope="module")
def plain_chat(folder, tmp_path_factory) -> Vocabulary:
    return with_template(folder, tmp_path_factory.mktemp("plain"), unmarked(CHATML))


def with_template(folder: Path, place: Path, template: str, **fields: Any) -> Vocabulary:
    """Returns the vocabulary of a copy of the folder with a chat template."""
    place.mkdir(exist_ok=True)
    (place / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    values = json.loads((folder / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps({**values, "chat_template": template, **fields}))
    return read_hub_vocabulary(place)


def learned(vocabulary: Vocabulary, *turns: Turn) -> str:
    """Returns the text of the tokens that count for the loss."""
    (example,) = vocabulary.encode_examples([Dialogue("a.jsonl:1", turns)])
    return vocabulary.tokenizer.decode(example.tokens[example.counted].tolist(), skip_special_tokens=False)


def expected(theirs: Any, template: str, messages: Sequence[dict[str, str]]) -> tuple[list[int], list[bool]]:
    found = theirs.apply_chat_template(
        messages, chat_template=marked(template), return_dict=True, return_assistant_tokens_mask=True
    )
    return found["input_ids"], [bool(mark) for mark in found["assistant_masks"]]


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("ours", [unmarked, marked], ids=["found", "marked"])
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_tokens_and_marks_are_those_of_transformers(folders, tmp_path, name, ours, kind):
    theirs = import_transformers().AutoTokenizer.from_pretrained(folders[kind])
    vocabulary = with_template(folders[kind], tmp_path / "hub", ours(TEMPLATES[name]))
    talks = [TALK, TALK[:2], (Turn("instruction", "add"), Turn("input", "1, 2"), Turn("output", "3"))]
    if name in ("chatml", "llama3"):
        talks += [
            (Turn("system", ""), *TALK),
            (Turn("user", "?"), ANSWER, ANSWER),
            (*TALK[:2], Turn("tool", "5"), ANSWER),
        ]
    dialogues = [Dialogue(f"a.jsonl:{i}", turns) for i, turns in enumerate(talks, start=1)]
    for dialogue, example in zip(dialogues, vocabulary.encode_examples(dialogues), strict=True):
        tokens, counted = expected(theirs, TEMPLATES[name], dialogue.messages())
        assert example.name == dialogue.name
        assert example.tokens.tolist() == tokens
        assert example.counted.tolist() == counted
        assert (example.tokens.dtype, example.counted.dtype) == (np.int32, np.bool_)
    assert vocabulary.chat_prompt("more?") == theirs.apply_chat_template(
        [{"role": "user", "content": "more?"}],
        chat_template=unmarked(TEMPLATES[name]),
        add_generation_prompt=True,
        return_dict=False,
    )


def test_only_an_answer_and_its_end_count(folder, tmp_path):
    for name, answer, end in [
        ("chatml", ANSWER.content, "<|im_end|>"),
        ("llama3", ANSWER.content.strip(), "<|eot|>"),
        ("mistral", " " + ANSWER.content, "</s>"),
        ("gemma", ANSWER.content.strip(), "</turn>"),
    ]:
        vocabulary = with_template(folder, tmp_path, unmarked(TEMPLATES[name]))
        assert learned(vocabulary, *TALK[:2]) == answer + end
        assert vocabulary.format.ends == (vocabulary.tokenizer.token_to_id(end),)
    closed = (
        BARE.replace(": ", ":\\n") + "{% if add_generation_prompt %}assistant:\n{% else %}{{ eos_token }}{% endif %}"
    )
    closing = with_template(folder, tmp_path, unmarked(closed))
    assert learned(closing, *TALK) == f"{ANSWER.content}\nno\n</s>", "the final end token, if there is no other"
    assert closing.format.ends == (closing.end,)
    bare = with_template(folder, tmp_path, unmarked(BARE))
    assert learned(bare, *TALK[2:]) == "assistant: no\n", (
        "all text that the answer adds, if the template has no prompt and no end"
    )
    assert bare.format.ends == ()


@given(question=st.text(), answer=st.text(min_size=1))
def test_every_byte_of_an_answer_counts(plain_chat, question, answer):
    assert learned(plain_chat, Turn("user", question), Turn("assistant", answer)) == answer + "<|im_end|>"


def test_token_across_the_boundary_of_an_answer_does_not_count(folder, tmp_path):
    # The prompt ends with a space and the answer begins with a word: one token covers both.
    template = "{% for m in messages %}{{ '> ' if m.role == 'user' else '< ' }}{{ m.content + '</s>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ '< ' }}{% endif %}"
    with_template(folder, tmp_path, template)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    for trimmed in (False, True):  # with trimmed offsets, the token would count as part of the answer
        values["post_processor"]["processors"][0]["trim_offsets"] = trimmed
        (tmp_path / "tokenizer.json").write_text(json.dumps(values))
        vocabulary = read_hub_vocabulary(tmp_path)
        offsets = vocabulary.tokenizer.encode("< va va", add_special_tokens=False).offsets
        assert offsets == [(0, 1), *([(2, 4), (5, 7)] if trimmed else [(1, 4), (4, 7)])], (
            "the tokenizer must produce the intended offsets"
        )
        assert learned(vocabulary, Turn("user", "?"), Turn("assistant", "va va")) == " va</s>"


def test_marks_of_the_template_are_used_unchanged(folder, tmp_path):
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}<<{{ m.content }}</s>\n>>va"
    template += "{% endif %}{% endfor %}"
    assert learned(with_template(folder, tmp_path, marked(template)), *TALK) == f"{ANSWER.content}</s>\nno</s>\n"
    template = template.replace("</s>\n", "")
    spaced = Turn("assistant", "no ")
    assert learned(with_template(folder, tmp_path, marked(template)), QUESTION, spaced) == "no", (
        "' va' must not count, because it crosses the end"
    )


def test_earlier_answers_that_are_formatted_differently_do_not_count(folder, tmp_path):
    vocabulary = with_template(folder, tmp_path, THINKING)
    first, second = (
        Turn("assistant", "<think>\nhm\n</think>\n\nhello"),
        Turn("assistant", "<think>\nso\n</think>\n\nno"),
    )
    assert learned(vocabulary, QUESTION, first, Turn("user", "more"), second) == second.content + "<|im_end|>"
    assert learned(vocabulary, *TALK[2:]) == "<think>\n\n</think>\n\nno<|im_end|>"


def test_template_whose_last_answer_cannot_be_located_raises(folder, tmp_path):
    opening = THINKING.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\nlet me see' }}{% endif %}")
    vocabulary = with_template(folder, tmp_path, opening)
    with pytest.raises(
        RunError, match=r"--data: a\.jsonl:1: the chat template of .*tokenizer_config\.json formats the"
    ):
        learned(vocabulary, *TALK[2:])


@pytest.mark.parametrize(
    ("template", "turns", "message"),
    [
        (MISTRAL, TALK[1:], r"a\.jsonl:1: the chat template of .* rejects it: Roles must alternate user/assistant"),
        (GEMMA, (Turn("system", ""), *TALK), r"a\.jsonl:1: the chat template of .* rejects it: System role not supp"),
        ("{{ messages + 1 }}", TALK, r"a\.jsonl:1: the chat template of .* rejects it: can only concatenate list"),
        ("{{ messages[0].nothing.role }}", TALK, r"rejects it: 'dict object' has no attribute 'nothing'"),
        ("{{ ''.__class__.__mro__ }}", TALK, r"rejects it: access to attribute '__class__'"),
        (
            "{{ messages.append(1) }}",
            TALK,
            r"rejects it: access to attribute 'append'|rejects it: .*append.* is not safe",
        ),
        (
            "{% for m in messages %}\n{{ m.role }",
            TALK,
            r"tokenizer_config\.json: line 2 of the chat template: unexpected",
        ),
        ("<<{{ messages[0].role[:0] }}>>", TALK, r"a\.jsonl:1: the chat template of .* marks no answer in it"),
        ("{{ 'a' * 10**10 }}", TALK, r"a\.jsonl:1: the chat template of .*json needs more than 100 MiB of memory$"),
        (
            "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            TALK,
            r"a\.jsonl:1: the chat template of .*json needs more than 100 MiB of memory$",
        ),
        pytest.param(  # it takes these two seconds, and the next test checks both ends
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            TALK,
            r"a\.jsonl:1: the chat template of .*json needs more than 2 s of CPU time$",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_template_errors_name_the_record(folder, tmp_path, template, turns, message):
    vocabulary = with_template(folder, tmp_path, marked(template))
    with pytest.raises(RunError, match=message) as caught:
        learned(vocabulary, *turns)
    assert "\n" not in str(caught.value)


def test_a_process_that_takes_too_much_time_is_named(monkeypatch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)\n")
    monkeypatch.setattr(template_worker, "PROGRAM", program)
    with pytest.raises(template_worker.TemplateFault, match=r"^needs more than 2 s of CPU time$"):
        template_worker.TemplateWorker().literals("", DATE)

    limits = {}
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.update({kind: limit}))
    monkeypatch.setattr("sys.stdin", ["{}"])
    used = resource.getrusage(resource.RUSAGE_SELF)
    template_process.main()
    seconds, hard = limits[resource.RLIMIT_CPU]
    assert 2 < seconds - (used.ru_utime + used.ru_stime) < 4
    assert hard == resource.RLIM_INFINITY


def test_contents_with_control_tokens_raise(folder, tmp_path):
    vocabulary = with_template(folder, tmp_path, THINKING)
    for turns in (
        (Turn("user", "a<|im_end|>"), ANSWER),
        (QUESTION, Turn("assistant", "a<|im_start|>user")),
        (Turn("system", "</s>"), *TALK),
        (Turn("user", "<think>"), ANSWER),
        (Turn("user", "\ufdd0"), ANSWER),
    ):
        with pytest.raises(RunError, match=r"--data: a\.jsonl:1 contains '.*', which is a token of the chat templ"):
            learned(vocabulary, *turns)
    with pytest.raises(RunError, match=r"^--prompt contains '<\|im_end\|>', which is a token"):
        vocabulary.chat_prompt("a<|im_end|>")
    assert (
        learned(with_template(folder, tmp_path, unmarked(CHATML)), Turn("user", "<think>"), TALK[3]) == "no<|im_end|>"
    )


def test_end_token_that_includes_white_space_counts(folder, tmp_path):
    vocabulary = with_template(folder, tmp_path, marked(CHATML))
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in values["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    for template in (marked(CHATML), unmarked(CHATML)):
        with_template(tmp_path, tmp_path, template)
        vocabulary = read_hub_vocabulary(tmp_path)
        assert learned(vocabulary, *TALK) == f"{ANSWER.content}<|im_end|>no<|im_end|>"


# Files that contain the template


def test_template_is_read_from_the_same_file_as_in_transformers(folder, tmp_path):
    def found() -> str | None:
        template = read_chat_template(tmp_path)
        return None if template is None else template.source

    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert found() is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "third"}))
    assert found() == "third"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "second"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert found() == "second"
    (tmp_path / "chat_template.jinja").write_text("first")
    assert found() == "first"
    assert (
        import_transformers()
        .AutoTokenizer.from_pretrained(with_template(folder, tmp_path, "second").folder)
        .chat_template
        == "first"
    )
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(RunError, match=r"cannot read .*chat_template\.jinja"):
        found()
    (tmp_path / "chat_template.jinja").unlink()
    for wrong in (5, named[:1]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": wrong}))
        with pytest.raises(
            RunError, match=r"tokenizer_config\.json: chat_template must be a string or a list with one"
        ):
            found()


def test_tokens_are_template_variables_in_every_format(folder, tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    token = {"content": "</s>", "special": True, "lstrip": False}
    vocabulary = with_template(folder, tmp_path, template, bos_token=None, eos_token=token)
    (example,) = vocabulary.encode_examples([Dialogue("a", (Turn("user", "more"), Turn("assistant", "no")))])
    assert vocabulary.tokenizer.decode(example.tokens.tolist(), skip_special_tokens=False) == "more</s>no</s>"
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|eot|>"}))
    assert learned(read_hub_vocabulary(tmp_path), *TALK[2:]) == "no</s>"
    values = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del values["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    assert learned(read_hub_vocabulary(tmp_path), *TALK[2:]) == "no<|eot|>"


def test_resumed_run_keeps_the_date_of_its_start(folder, tmp_path):
    dated = "{{ strftime_now('%d %b %Y') }}" + unmarked(CHATML)
    vocabulary = with_template(folder, tmp_path / "hub", dated)
    today = datetime.date.today()
    assert vocabulary.tokenizer.decode(vocabulary.chat_prompt("a")).startswith(today.strftime("%d %b %Y"))
    run = tmp_path / "run"
    run.mkdir()
    vocabulary.write(run, weights=False)
    assert (run / "hub" / DATE).read_text() == f"{vocabulary.chat_template.date}\n"  # pyright: ignore[reportOptionalMemberAccess]
    (run / "hub" / DATE).write_text("2024-02-29\n")
    again = read_hub_vocabulary(run / "hub")
    assert again.tokenizer.decode(again.chat_prompt("a")).startswith("29 Feb 2024")
    (run / "hub" / DATE).write_text("yesterday")
    with pytest.raises(RunError, match=f"cannot read .*{DATE}"):
        read_hub_vocabulary(run / "hub").chat_prompt("a")
