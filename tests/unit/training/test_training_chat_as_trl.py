"""Our samples are TRL's: the same tokens, and the same of them in the loss."""

from pathlib import Path

import pytest

from chats import CHATML, MARKED_CHATML, chat, chat_tokenizer
from torpor.training.chat import SampleEncoder

CONVERSATION = chat("Hi", "Hello", "Sum of 1 and 2?", "3 \N{HEDGEHOG}")["messages"]
CASES = {
    "strings": ({"prompt": "1 + 2 =", "completion": " 3"}, CHATML, False),
    "messages": ({"prompt": CONVERSATION[:3], "completion": CONVERSATION[3:]}, CHATML, False),
    "marked": ({"messages": CONVERSATION}, MARKED_CHATML, True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_record_becomes_the_sample_that_trl_makes_of_it(tmp_path, case):
    import datasets
    import transformers
    import trl

    record, template, is_marked = CASES[case]
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=320,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(
            output_dir=str(tmp_path),
            report_to=[],
            use_cpu=True,
            assistant_only_loss=is_marked,
            eos_token="<eos>",
        ),
        train_dataset=datasets.Dataset.from_list([record]),
        processing_class=chat_tokenizer(template),
    )
    (theirs,) = trainer.train_dataset
    ours = SampleEncoder(chat_tokenizer(template)).encode(record, "here")
    assert ours.tokens == theirs["input_ids"]
    labels = [t if flag else -100 for t, flag in zip(ours.tokens, ours.is_response, strict=True)]
    assert labels == theirs["labels"]


@pytest.mark.parametrize(
    ("name", "opening"), [("nemotron_3_nano", ""), ("nemotron_3_nano_training", "<think>")]
)
def test_the_templates_of_a_trainable_family_can_be_read(name, opening):
    """Its generation prompt opens a thought that plain conversations do not have."""
    import trl

    template = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    tokenizer = chat_tokenizer(template.read_text())
    sample = SampleEncoder(tokenizer).encode({"messages": CONVERSATION}, "here")
    response = [token for token, flag in zip(sample.tokens, sample.is_response, strict=True) if flag]
    turn = opening + "</think>{}<|im_end|>\n"
    assert tokenizer.decode(response) == turn.format("Hello") + turn.format("3 \N{HEDGEHOG}")
    completion = {"prompt": CONVERSATION[:3], "completion": CONVERSATION[3:]}
    sample = SampleEncoder(tokenizer).encode(completion, "here")
    response = [token for token, flag in zip(sample.tokens, sample.is_response, strict=True) if flag]
    assert tokenizer.decode(response) == turn.format("3 \N{HEDGEHOG}")
