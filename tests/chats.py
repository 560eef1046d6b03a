"""Tokenizers and chat templates for fine-tuning tests."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same, with the assistant's words marked; the newline after them is not its own.
MARKED_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<eos>", "<|im_start|>", "<|im_end|>"]


def chat_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte and the special tokens that ChatML needs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, *SPECIAL])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", additional_special_tokens=SPECIAL[1:]
    )
    wrapped.chat_template = template
    return wrapped


def give_chat(folder: Path, template: str | None = CHATML) -> Path:
    """Put such a tokenizer into a model folder, in place of its own."""
    for file in folder.glob("tokenizer*"):
        file.unlink()
    chat_tokenizer(template).save_pretrained(folder)
    return folder


def chat(*contents: str) -> dict:
    """A record of a conversation that the user begins."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}


def write_records(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
