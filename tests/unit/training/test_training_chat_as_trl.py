"""Our samples are TRL's: the same tokens, and the same of them in the loss."""

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
