"""Other people's trainers with one line of ours: every folder that they save has the heads of its source.

Transformers' Trainer, TRL's SFTTrainer with and without adapters, and Accelerate.
"""

import pytest
import torch
import transformers

from golden_folders import write_golden
from hf_training import load_model, token_rows, training_arguments, write_tokenizer
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.graft import graft_in_place
from torpor.checkpoints.inspect import inspect_folder
from torpor.checkpoints.verify import verify_folders
from torpor.errors import CheckpointError, UnsupportedModelError
from torpor.huggingface import KeepMTPCallback, keep_mtp

# Copies of the trunk inside the MTP layer; heads beside the model; tied embeddings and experts.
FAMILIES = ["deepseek_v3", "qwen3_5", "ernie4_5_moe"]


def make_trainer(source, out, callbacks=(), model=None, **arguments):
    """A Trainer of a folder's trunk on random tokens."""
    return transformers.Trainer(
        model=model or load_model(source),
        args=training_arguments(out, **arguments),
        train_dataset=token_rows(),
        callbacks=list(callbacks),
    )


def weights(model):
    """Every tensor's bytes, in CPU memory."""
    return {
        name: tensor.detach().clone().view(torch.uint8).numpy().tobytes()
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer(tmp_path, family):
    """Checkpoints and the final save verify; the trained trunk is the Trainer's own, to the bit."""
    source = write_golden(tmp_path / "source", family)
    trainer = make_trainer(source, tmp_path / "out", [KeepMTPCallback(source)])
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    for folder in (tmp_path / "out" / "checkpoint-1", tmp_path / "out" / "checkpoint-2", tmp_path / "final"):
        result = verify_folders(source, folder)
        assert result.ok, folder
        assert result.trunk_changed > result.trunk_tensors / 2
        assert inspect_folder(folder).ok

    plain = make_trainer(source, tmp_path / "plain")
    plain.train()
    assert weights(plain.model) == weights(trainer.model)
    # Without the callback the same checkpoint has lost them.
    without = tmp_path / "plain" / "checkpoint-2"
    result = verify_folders(source, without)
    assert not result.ok
    assert len(result.mtp_names("missing")) == len(result.mtp)
    assert not inspect_folder(without).ok
    of_ours = open_folder(tmp_path / "out" / "checkpoint-2")
    trunk = open_folder(without)
    assert all(of_ours.sha256(name) == trunk.sha256(name) for name in trunk.tensors)


def test_resumed_trainer(tmp_path):
    """A run that is continued from such a checkpoint ends where one without a break ends, to the bit."""
    source = write_golden(tmp_path / "source", "qwen3_5")
    whole = make_trainer(source, tmp_path / "whole", [KeepMTPCallback(source)])
    whole.train()
    resumed = make_trainer(source, tmp_path / "whole", [KeepMTPCallback(source)])
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert weights(resumed.model) == weights(whole.model)
    assert verify_folders(source, tmp_path / "whole" / "checkpoint-2").ok


def test_resumed_trainer_of_renamed_tensors(tmp_path):
    """Where Transformers renames tensors as it loads, the model has to be loaded from the checkpoint.

    Its Trainer loads checkpoints without renaming, with our callback or without, and warns of missing keys.
    """
    source = write_golden(tmp_path / "source", "deepseek_v3")
    whole = make_trainer(source, tmp_path / "whole", [KeepMTPCallback(source)])
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-1"
    resumed = make_trainer(
        source, tmp_path / "resumed", [KeepMTPCallback(source)], model=load_model(checkpoint)
    )
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert weights(resumed.model) == weights(whole.model)
    assert verify_folders(source, tmp_path / "resumed" / "checkpoint-2").ok


def test_refused_before_the_first_step(tmp_path):
    """A family that is not known when the Trainer is made, a vocabulary that has grown before it steps."""
    source = write_golden(tmp_path / "source", "qwen3_5")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=128
    )
    llama = transformers.LlamaForCausalLM(config)
    with pytest.raises(UnsupportedModelError, match="'llama'"):
        make_trainer(source, tmp_path / "out", [KeepMTPCallback(source)], model=llama)
    trainer = make_trainer(source, tmp_path / "out", [KeepMTPCallback(source)])
    before = weights(trainer.model)
    trainer.model.resize_token_embeddings(130)
    with pytest.raises(CheckpointError, match=r"the model has vocab_size 130, .* has 128"):
        trainer.train()
    trainer.model.resize_token_embeddings(128)
    assert weights(trainer.model) == before
    assert not (tmp_path / "out" / "checkpoint-1").exists()


def test_model_made_by_the_trainer(tmp_path):
    """With `model_init` there is no model before training begins."""
    source = write_golden(tmp_path / "source", "qwen3_5")
    trainer = transformers.Trainer(
        model_init=lambda: load_model(source),
        args=training_arguments(tmp_path / "out", max_steps=1),
        train_dataset=token_rows(),
        callbacks=[KeepMTPCallback(source)],
    )
    trainer.train()
    assert verify_folders(source, tmp_path / "out" / "checkpoint-1").ok


def test_heads_that_cannot_be_written(tmp_path, monkeypatch):
    """A checkpoint is finished before training ends with the reason; a save by hand raises at once."""
    source = write_golden(tmp_path / "source", "qwen3_5")
    callback = KeepMTPCallback(source)
    trainer = make_trainer(source, tmp_path / "out", [callback])

    def fail(*_):
        raise CheckpointError("no room")

    monkeypatch.setattr("torpor.huggingface.graft_in_place", fail)
    with pytest.raises(CheckpointError, match=r"checkpoint-1 was saved without its MTP layers: no room"):
        trainer.train()
    assert (tmp_path / "out" / "checkpoint-1" / "optimizer.pt").exists()
    assert not (tmp_path / "out" / "checkpoint-2").exists()
    # What would have been uploaded meanwhile is not.
    with pytest.raises(CheckpointError, match="no room"):
        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    with pytest.raises(CheckpointError, match=r"^no room$"):
        trainer.save_model(str(tmp_path / "final"))
    monkeypatch.undo()
    trainer.save_model(str(tmp_path / "final"))
    assert verify_folders(source, tmp_path / "final").ok


def sentences():
    """A dataset of words, as TRL takes them."""
    import datasets

    return datasets.Dataset.from_list(
        [{"text": " ".join(f"w{2 + (7 * row + column) % 126}" for column in range(12))} for row in range(8)]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_trl(tmp_path, family):
    """TRL's supervised fine-tuning, which brings its own collator, loss and arguments."""
    import trl

    source = write_tokenizer(write_golden(tmp_path / "source", family))
    arguments = training_arguments(tmp_path / "out", trl.SFTConfig, bf16=False, max_length=16)
    trainer = trl.SFTTrainer(
        model=load_model(source),
        args=arguments,
        train_dataset=sentences(),
        processing_class=transformers.AutoTokenizer.from_pretrained(source),
        callbacks=[KeepMTPCallback(source)],
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    for folder in (tmp_path / "out" / "checkpoint-1", tmp_path / "out" / "checkpoint-2", tmp_path / "final"):
        assert verify_folders(source, folder).ok, folder
    assert (tmp_path / "final" / "tokenizer.json").exists()


def test_trl_with_adapters(tmp_path, caplog):
    """Checkpoints hold adapters alone; merged at the end they make a whole folder."""
    import peft
    import trl

    source = write_tokenizer(write_golden(tmp_path / "source", "deepseek_v3"))
    trainer = trl.SFTTrainer(
        model=load_model(source),
        args=training_arguments(tmp_path / "out", trl.SFTConfig, bf16=False, max_length=16),
        train_dataset=sentences(),
        processing_class=transformers.AutoTokenizer.from_pretrained(source),
        peft_config=peft.LoraConfig(target_modules=["q_a_proj", "o_proj"], r=2, task_type="CAUSAL_LM"),
        callbacks=[KeepMTPCallback(source)],
    )
    trainer.train()
    said = [record.message for record in caplog.records if record.name == "torpor.huggingface"]
    assert said == ["adapters are saved without MTP layers: they have no trunk; merged saves have them"]
    assert (tmp_path / "out" / "checkpoint-2" / "adapter_model.safetensors").exists()
    trainer.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    result = verify_folders(source, tmp_path / "merged")
    assert result.ok
    assert result.trunk_changed == 2 * 3  # two projections of three layers


def test_accelerate(tmp_path):
    """A loop of one's own, saved as Accelerate's documentation says."""
    import accelerate

    source = write_golden(tmp_path / "source", "qwen3_5")
    accelerator = accelerate.Accelerator(cpu=True)
    model = load_model(source)
    keep_mtp(model, source)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(token_rows(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.unwrap_model(model).save_pretrained(
        tmp_path / "saved",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    result = verify_folders(source, tmp_path / "saved")
    assert result.ok
    assert result.trunk_changed > result.trunk_tensors / 2
    # Accelerate's own save_model writes tensors without a configuration: no folder that heads could go into.
    accelerator.save_model(model, tmp_path / "bare")
    with pytest.raises(CheckpointError, match=r"bare has no config\.json"):
        graft_in_place(source, tmp_path / "bare")
