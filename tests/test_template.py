from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from toy_tokenizers import CHATML, CONFIG, byte_level, templated, write
from transformers import PreTrainedTokenizerFast

from rollkv.runtime.text import TextError, Tokenizer

HEADERS = """{{- bos_token -}}
{%- for m in messages -%}
    {{- '<|im_start|>' ~ m['role'] ~ '<|im_end|>\n\n' -}}
    {{- m['content'] | trim ~ eos_token -}}
{%- endfor -%}
{{- '<|im_start|>assistant<|im_end|>\n\n' if add_generation_prompt -}}
"""
NAMESPACE = """{% set ns = namespace(system='', n=0) %}
{% for m in messages if m.role == 'system' %}
    {% set ns.system = m.content %}
{% endfor %}
{{ bos_token }}{{ ns.system }}
{% for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
    {% if ns.n > 1 %}{% break %}{% endif %}
    {% set ns.n = ns.n + 1 %}
[{{ ns.n }}] {{ m.content }}{{ unk_token }}{{ pad_token }}
{% endfor %}
{% if tools or documents %}tools{% endif %}
"""
JSON = """{% for m in messages %}{{ m | tojson }}
{{ m.content | tojson(indent=2) }} {% generation %}{{ m.role }}
{% endgeneration %}
{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "namespace": NAMESPACE, "json": JSON}
CONVERSATIONS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": 'be <brief> & "good"'}, {"role": "user", "content": " 你好 🙂 <s>"}],
    [
        {"role": "user", "content": "the quick"},
        {"role": "assistant", "content": "brown fox", "tool_calls": None},
        {"role": "user", "content": "don't\n\nstop"},
    ],
]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write(tmp_path / "bündle 1", byte_level(), **CONFIG, chat_template=CHATML)


@pytest.fixture
def tokenizer(bundle: Path) -> Tokenizer:
    return Tokenizer(bundle)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_chat_ids_equal_those_of_transformers(bundle: Path, name: str, conversation: list[dict[str, Any]]) -> None:
    ours = templated(bundle, TEMPLATES[name])
    theirs = PreTrainedTokenizerFast.from_pretrained(str(bundle))
    for prompt in (True, False):
        want = theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=prompt)
        assert ours.render(conversation, add_generation_prompt=prompt) == want
    want = theirs.apply_chat_template(conversation, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ours.chat_ids(conversation) == want


def test_a_template_that_writes_the_begin_token_gives_exactly_one(bundle: Path) -> None:
    assert templated(bundle, HEADERS).chat_ids([{"role": "user", "content": "hello"}]).count(0) == 1


def test_the_template_file_goes_before_the_config(bundle: Path) -> None:
    (bundle / "chat_template.jinja").write_text("file: {{ messages[0].content }} ü", encoding="utf-8")
    assert Tokenizer(bundle).render([{"role": "user", "content": "x"}]) == "file: x ü"


def test_of_several_named_templates_the_default_one_is_used(bundle: Path) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "plain"}]
    assert templated(bundle, named).render([{"role": "user", "content": "x"}]) == "plain"


def test_the_template_can_read_the_date(bundle: Path) -> None:
    assert templated(bundle, "{{ strftime_now('%Y') }}").render([{"role": "user", "content": "x"}]) == time.strftime(
        "%Y"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, r"has no chat template; leave --chat out"),
        ("{{ raise_exception('roles must alternate') }}", r"refuses this conversation: roles must alternate"),
        ("a\n{% if %}", r"tokenizer_config\.json: line 2 of the chat template: Expected an expression"),
        ("{{ messages | nofilter }}", r"line 1 of the chat template: No filter named 'nofilter'"),
        ("{{ 'a' + 1 }}", r"the chat template fails: TypeError: "),
        ("{{ nothing.at.all }}", r"the chat template fails: UndefinedError: 'nothing' is undefined"),
        ([{"name": "rag", "template": "x"}], r"chat_template has the names \['rag'\]; allowed: one named 'default'"),
        (7, r"chat_template is a int; allowed: a string or a list"),
    ],
)
def test_a_template_that_cannot_be_used_says_why(bundle: Path, template: Any, message: str) -> None:
    with pytest.raises(TextError, match=message):
        templated(bundle, template).render([{"role": "user", "content": "x"}])


def test_a_template_file_that_is_not_utf8_is_named(bundle: Path) -> None:
    (bundle / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TextError, match=r"chat_template\.jinja is not UTF-8"):
        Tokenizer(bundle).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__.x }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ('{0.__class__.__mro__}' | attr('format'))('') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% set ns = namespace(__html__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ range(10000000) | length }}",
    ],
)
def test_a_template_that_reaches_out_of_the_sandbox_is_refused(bundle: Path, template: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(TextError, match=r"the chat template fails: (SecurityError|OverflowError): "):
        templated(bundle, template).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"the conversation is \[\]; allowed: a list of at least one message"),
        ("hello", r"the conversation is 'hello'; allowed: a list"),
        (["hello"], r"message 0 is a str; allowed: a mapping with role and content"),
        ([{"content": "x"}], r"message 0 has the keys \['content'\] and no role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], r"message 1 \(user\) has no content; allowed: content"),
        ([{"role": "user", "content": None}], r"message 0 \(user\) has no content"),
        ([{"role": "user", "content": 5}], r"message 0 \(user\) has content of type int; allowed: a string or a list"),
        ([{"role": "user", "content": [object()]}], r"message 0, content has type object; allowed: strings, numbers"),
    ],
)
def test_a_malformed_message_is_refused_by_its_number(tokenizer: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(TextError, match=message):
        tokenizer.render(messages)


def test_a_message_that_is_not_utf8_is_refused_with_the_position(tokenizer: Tokenizer) -> None:
    with pytest.raises(TextError, match="message 1, content holds byte 0x80 at position 3"):
        tokenizer.chat_ids([{"role": "user", "content": "a"}, {"role": "user", "content": "abc\udc80"}])
    with pytest.raises(TextError, match="message 0, content, text holds byte 0x80 at position 0"):
        tokenizer.chat_ids([{"role": "user", "content": [{"type": "text", "text": "\udc80"}]}])
