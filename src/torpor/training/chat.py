"""From a record of a fine-tuning data set to tokens, and which of them are the response.

A record holds `messages` (a conversation), or `prompt` and `completion` (two strings, or two lists of
messages that make one conversation); `tools` and `chat_template_kwargs` go to the chat template. These are
the formats of TRL and of most published data sets.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torpor.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# As Transformers looks for it (utils/chat_template_utils.py).
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FORMATS = (
    '  A record looks like {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}\n'
    '  or like {"prompt": "...", "completion": "..."}.'
)


@dataclass(frozen=True)
class Sample:
    """One record as the model sees it.

    Args:
        tokens: the whole text.
        is_response: for each token, whether the model is to learn to write it.
    """

    tokens: list[int]
    is_response: list[bool]


class SampleEncoder:
    """Turns records into samples, with a tokenizer and its chat template.

    The response of a conversation is what the assistant says. Where the template marks that itself, with
    `{% generation %}`, its marks are taken. Elsewhere an assistant's turn is what the template writes between
    the generation prompt after the messages before it and the end of the turn, end-of-turn token included::

        <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                               ^^^^^ ^^^^^^^^^^

    which needs a template that writes the beginning of a conversation the same whatever follows it: checked
    for every turn of every record. Only the generation prompt itself may be more than the turn begins with:
    of a prompt that opens a thought, `<think>\\n`, and a turn without one, `<think></think>Hello`, the
    response is `</think>Hello`. A token counts as response if any of its characters does, as in Transformers.

    The response of a prompt and a completion is the completion and the end-of-text token after it.

    Args:
        tokenizer: the model's tokenizer.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self._marks_generation = isinstance(template, str) and bool(_GENERATION_BLOCK.search(template))

    def encode(self, record: Mapping[str, Any], where: str) -> Sample:
        """Turn one record into a sample.

        Args:
            record: see above.
            where: its place, for messages.

        Raises:
            ConfigError: the record has another form, has nothing to learn, or cannot be rendered; or the
                tokenizer has no chat template, or one whose responses cannot be told apart.
        """
        present = {name: value for name, value in record.items() if value is not None}
        if "messages" in present:
            messages = _check_messages(present["messages"], "messages", where)
            return self._encode_conversation(messages, 0, present, where)
        if "prompt" in present and "completion" in present:
            prompt, completion = present["prompt"], present["completion"]
            if isinstance(prompt, str) and isinstance(completion, str):
                return self._encode_strings(prompt, completion, where)
            before = _check_messages(prompt, "prompt", where)
            messages = before + _check_messages(completion, "completion", where)
            return self._encode_conversation(messages, len(before), present, where)
        raise ConfigError(_explain_fields(present, where))

    def _encode_strings(self, prompt: str, completion: str, where: str) -> Sample:
        tokenizer = self._tokenizer
        for name, text in (("prompt", prompt), ("completion", completion)):
            _check_characters(text, name, where)
        # Apart, since the model reads the prompt alone when it is asked for the completion.
        given = list(tokenizer(prompt, verbose=False)["input_ids"])
        if given[-1:] == [tokenizer.eos_token_id] and not prompt.endswith(str(tokenizer.eos_token)):
            given.pop()  # some tokenizers end every text with it
        response = list(tokenizer(completion, add_special_tokens=False, verbose=False)["input_ids"])
        if response[-1:] != [tokenizer.eos_token_id]:
            response.append(tokenizer.eos_token_id)
        return Sample(given + response, [False] * len(given) + [True] * len(response))

    def _encode_conversation(
        self, messages: list[dict[str, Any]], first: int, record: Mapping[str, Any], where: str
    ) -> Sample:
        """Encode a conversation whose responses begin at message `first`."""
        turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        if not turns:
            raise ConfigError(
                f"`data`: {where} has no message of the role assistant to learn"
                f"{' in its completion' if first else ''}\n  Leave the record out, or give it a response."
            )
        self._check_template(where)
        more = record.get("chat_template_kwargs", {})
        if not isinstance(more, Mapping):
            raise ConfigError(
                f"`data`: {where}: `chat_template_kwargs` is a {type(more).__name__}, not an object\n"
                '  Write the chat template\'s variables as an object, such as {"enable_thinking": false}.'
            )
        options = {"tools": record.get("tools"), **more}
        text = self._render(messages, options, where)
        if self._marks_generation:
            return self._encode_marked(messages, first, text, options, where)
        if turns[0] == 0:
            raise ConfigError(
                f"`data`: {where} begins with the assistant, so that there is no prompt to respond to\n"
                "  Put a message before it, or leave the record out."
            )
        spans = []
        for turn in turns:
            before = self._render(messages[:turn], options, where, add_generation_prompt=True)
            after = self._render(messages[: turn + 1], options, where)
            start = _common_length(before, after)
            if start < len(before) and not after[:start].startswith(
                self._render(messages[:turn], options, where)
            ):
                raise ConfigError(_explain_prefix(where, turn, before, after, text))
            if not text.startswith(after):
                raise ConfigError(_explain_prefix(where, turn, before, after, text))
            spans.append((start, len(after)))
        tokens, offsets = self._tokenize(text)
        # A tokenizer that trims offsets (`trim_offsets`) leaves none of a token of spaces but its end.
        is_response = [
            any(start < end and (begin < stop or begin == end <= stop) for start, stop in spans)
            for begin, end in offsets
        ]
        return Sample(tokens, is_response)

    def _encode_marked(
        self,
        messages: list[dict[str, Any]],
        first: int,
        text: str,
        options: dict[str, Any],
        where: str,
    ) -> Sample:
        encoded = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
        )
        marked = [bool(mark) for mark in encoded["assistant_masks"]]
        if first:
            prompt = self._render(messages[:first], options, where)
            if not text.startswith(prompt):
                raise ConfigError(_explain_prefix(where, first, prompt, text, text))
            _, offsets = self._tokenize(text)
            marked = [mark and end > len(prompt) for mark, (_, end) in zip(marked, offsets, strict=True)]
        return Sample(list(encoded["input_ids"]), marked)

    def _tokenize(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of a rendered conversation, which has its special tokens already, and their characters."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])

    def _render(
        self, messages: list[dict[str, Any]], options: dict[str, Any], where: str, **more: Any
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, **options, **more)
        except Exception as error:  # templates raise what they like, the library what Jinja met
            raise ConfigError(
                f"`data`: {where} cannot be written with the chat template: {error}\n"
                "  Mend the record, or leave it out."
            ) from None
        _check_characters(text, "messages", where)
        return str(text)

    def _check_template(self, where: str) -> None:
        tokenizer = self._tokenizer
        if not isinstance(tokenizer.chat_template, str):
            has = "several chat templates" if tokenizer.chat_template else "no chat template"
            raise ConfigError(
                f"`data`: {where} is a conversation, and the model's tokenizer has {has}\n"
                "  Put one chat_template.jinja into the model's folder, for instance that of its instructed"
                " relative, or give records with `prompt` and `completion` as strings."
            )
        if not tokenizer.is_fast:
            raise ConfigError(
                f"the model's tokenizer ({type(tokenizer).__name__}) does not say which characters a token"
                " stands for\n  Conversations need a folder with tokenizer.json."
            )


def _check_messages(value: Any, field: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        what = "is empty" if value == [] else f"is a {type(value).__name__}, not a list of messages"
        raise ConfigError(f"`data`: {where}: `{field}` {what}\n{_FORMATS}")
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"`data`: {where}: `{field}[{number}]` has no `role`\n{_FORMATS}")
        # Tables give every message every field, None where it has none.
        messages.append({name: content for name, content in message.items() if content is not None})
    return messages


def _check_characters(text: str, field: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"`data`: {where}: `{field}` holds {text[error.start]!r}, half of a surrogate pair and no"
            " character\n  Write the whole character, or leave the record out."
        ) from None


def _explain_fields(present: Mapping[str, Any], where: str) -> str:
    names = ", ".join(present) or "none"
    if "text" in present:
        return (
            f"`data`: {where} has `text`, which does not say what of it is the response (fields: {names})\n"
            f"{_FORMATS}\n  Text without prompts is what `torpor distill` takes."
        )
    return (
        f"`data`: {where} has neither `messages` nor `prompt` and `completion` (fields: {names})\n{_FORMATS}"
    )


def _common_length(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def _explain_prefix(where: str, turn: int, before: str, after: str, text: str) -> str:
    whole, part = (text, after) if not text.startswith(after) else (after, before)
    same = _common_length(whole, part)
    return (
        f"`data`: {where}: the chat template writes what comes before the end of messages[{turn}] in one way"
        f" alone and in another with what follows: {part[max(0, same - 20) : same + 20]!r} becomes"
        f" {whole[max(0, same - 20) : same + 20]!r}\n"
        "  So it cannot be told what the assistant wrote. Mark that in the folder's chat template, with"
        " {% generation %} and {% endgeneration %} (TRL comes with such templates), or split conversations so"
        " that only the last message is the assistant's."
    )
