"""What docs/sft.md shows is read as it says."""

import json
import re
from pathlib import Path

import yaml

from chats import chat_tokenizer
from torpor.training.chat import SampleEncoder
from torpor.training.config import SftConfig

PAGE = (Path(__file__).parents[3] / "docs" / "sft.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_configuration_is_one(tmp_path):
    values = yaml.safe_load(block("yaml"))
    config = SftConfig(**values | {"data": str(tmp_path)})
    assert config.lora is not None
    assert config.lora.target_modules == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_each_record_has_the_response_3():
    tokenizer = chat_tokenizer()
    for line in block("json").splitlines():
        sample = SampleEncoder(tokenizer).encode(json.loads(line), "docs/sft.md")
        response = [t for t, flag in zip(sample.tokens, sample.is_response, strict=True) if flag]
        assert tokenizer.decode(response).replace("<|im_end|>", "<eos>").strip() == "3<eos>"
