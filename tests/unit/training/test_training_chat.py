"""Records to tokens: what of them is the response, for every format and kind of template."""

import itertools

import pytest

from chats import CHATML, MARKED_CHATML, chat, chat_tokenizer
from torpor.errors import ConfigError
from torpor.training.chat import SampleEncoder

CONVERSATION = chat("Hi", "Hello", "Sum of 1 and 2?", "3 \N{HEDGEHOG}")


def encode(record, template=CHATML):
    return SampleEncoder(chat_tokenizer(template)).encode(record, "chat.jsonl:7")


def pieces(sample):
    """The text of a sample, cut where its response begins or ends: [(text, is response)]."""
    tokenizer = chat_tokenizer()
    runs = itertools.groupby(zip(sample.tokens, sample.is_response, strict=True), key=lambda pair: pair[1])
    return [(tokenizer.decode([token for token, _ in run]), flag) for flag, run in runs]


def refusal(record, template=CHATML):
    with pytest.raises(ConfigError) as caught:
        encode(record, template)
    assert "chat.jsonl:7" in str(caught.value)
    return str(caught.value)


def test_the_response_is_what_the_assistant_says_with_its_end_of_turn():
    assert pieces(encode(CONVERSATION)) == [
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False),
        ("Hello<|im_end|>\n", True),
        ("<|im_start|>user\nSum of 1 and 2?<|im_end|>\n<|im_start|>assistant\n", False),
        ("3 \N{HEDGEHOG}<|im_end|>\n", True),
    ]


def test_a_template_that_marks_what_is_generated_is_taken_at_its_word():
    marked = pieces(encode(CONVERSATION, MARKED_CHATML))
    assert [text for text, is_response in marked if is_response] == [
        "Hello<|im_end|>",
        "3 \N{HEDGEHOG}<|im_end|>",
    ]
    assert "".join(text for text, _ in marked) == "".join(text for text, _ in pieces(encode(CONVERSATION)))


def test_a_prompt_and_a_completion_end_with_the_end_of_text_token():
    assert pieces(encode({"prompt": "1 + 2 =", "completion": " 3"})) == [
        ("1 + 2 =", False),
        (" 3<eos>", True),
    ]
    # Once, and also where the completion has it already or is empty.
    for completion in ("", "<eos>"):
        assert pieces(encode({"prompt": "a", "completion": completion})) == [("a", False), ("<eos>", True)]


def test_a_prompt_is_read_as_at_inference_with_what_the_tokenizer_puts_before_it():
    from tokenizers.processors import TemplateProcessing

    tokenizer = chat_tokenizer()
    ids = [("<|im_start|>", 257), ("<eos>", 256)]
    assert [tokenizer.convert_tokens_to_ids(token) for token, _ in ids] == [257, 256]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <eos>", special_tokens=ids
    )
    sample = SampleEncoder(tokenizer).encode({"prompt": "a", "completion": "b"}, "x")
    assert pieces(sample) == [("<|im_start|>a", False), ("b<eos>", True)]


@pytest.mark.parametrize("template", [CHATML, MARKED_CHATML])
def test_of_a_prompt_in_messages_no_turn_is_learned(template):
    messages = CONVERSATION["messages"]
    sample = encode({"prompt": messages[:3], "completion": messages[3:]}, template)
    assert [text.strip() for text, is_response in pieces(sample) if is_response] == [
        "3 \N{HEDGEHOG}<|im_end|>"
    ]
    assert sample.tokens == encode(CONVERSATION, template).tokens


def test_fields_that_a_table_fills_with_none_are_not_there():
    messages = [message | {"tool_calls": None} for message in CONVERSATION["messages"]]
    template = CHATML.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{% if 'tool_calls' in m %}!{% endif %}"
    )
    sample = encode({"messages": messages, "prompt": None, "tools": None}, template)
    assert sample == encode(CONVERSATION)


def test_tools_and_template_arguments_reach_the_template():
    template = "{{ tools[0]['name'] }} {{ mood }}\n" + CHATML
    record = CONVERSATION | {"tools": [{"name": "sum"}], "chat_template_kwargs": {"mood": "calm"}}
    assert pieces(encode(record, template))[0][0].startswith("sum calm\n<|im_start|>user")


def test_a_template_that_rewrites_earlier_turns_is_refused():
    # As templates do that drop the reasoning of all turns but the last.
    shown = "{% if m['role'] == 'user' or loop.last %}{{ m['content'] }}{% endif %}"
    dropping = CHATML.replace("{{ m['content'] }}", shown)
    message = refusal(CONVERSATION, dropping)
    assert "messages[1]" in message
    assert "Hello" in message
    assert "{% generation %}" in message
    assert pieces(encode(chat("Hi", "Hello"), MARKED_CHATML))  # and that is what helps


def test_a_turn_may_leave_the_generation_prompt_but_not_what_is_before_it():
    # As reasoning models do, whose generation prompt opens a thought that this data does not have.
    thinking = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif").replace(
        "{{ m['content'] }}", "{% if m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}"
    )
    assert [text for text, is_response in pieces(encode(CONVERSATION, thinking)) if is_response] == [
        "</think>Hello<|im_end|>\n",
        "</think>3 \N{HEDGEHOG}<|im_end|>\n",
    ]
    counting = "{{ messages | length }}" + thinking
    assert "messages[1]" in refusal(chat("Hi", "Hello"), counting)


@pytest.mark.parametrize(
    ("record", "template", "expected"),
    [
        (CONVERSATION, None, ["no chat template", "chat_template.jinja"]),
        ({"text": "words"}, CHATML, ["`text`", '"messages"', '"prompt"', "torpor distill"]),
        ({"question": "q", "answer": "a"}, CHATML, ["neither `messages` nor", "question, answer"]),
        (chat("Hi"), CHATML, ["no message of the role assistant"]),
        ({"messages": [{"role": "assistant", "content": "x"}]}, CHATML, ["begins with the assistant"]),
        ({"messages": []}, CHATML, ["`messages` is empty"]),
        ({"messages": "Hi"}, CHATML, ["`messages` is a str"]),
        ({"messages": [{"content": "x"}]}, CHATML, ["`messages[0]` has no `role`"]),
        ({"prompt": "a", "completion": 3}, CHATML, ["`prompt` is a str, not a list"]),
        ({"prompt": "a", "completion": "\ud800"}, CHATML, ["half of a surrogate pair"]),
        (chat("\ud800", "x"), CHATML, ["half of a surrogate pair"]),
        (chat("a", "b"), "{{ raise_exception('roles must alternate') }}", ["roles must alternate"]),
        (chat("a", "b"), "{% for %}", ["cannot be written with the chat template"]),
        (chat("a", "b") | {"chat_template_kwargs": "{}"}, CHATML, ["`chat_template_kwargs` is a str"]),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(record, template, expected):
    message = refusal(record, template)
    for part in expected:
        assert part in message


def test_spaces_are_learned_from_tokenizers_that_trim_offsets(monkeypatch):
    from tokenizers import processors

    record = chat("  Hi  ", "  if x:\n    y  ")
    expected = encode(record)
    tokenizer = chat_tokenizer()
    trimming = processors.ByteLevel(trim_offsets=True, add_prefix_space=False)
    monkeypatch.setattr(tokenizer.backend_tokenizer, "post_processor", trimming)
    (begin, end), *_ = tokenizer(" ", return_offsets_mapping=True)["offset_mapping"]
    assert begin == end  # trimmed it is
    assert SampleEncoder(tokenizer).encode(record, "x") == expected


def test_several_templates_are_refused():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": CHATML}
    with pytest.raises(ConfigError, match="several chat templates"):
        SampleEncoder(tokenizer).encode(CONVERSATION, "x")
