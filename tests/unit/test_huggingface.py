"""A model with `keep_mtp` is saved with its heads, again and again, and no other model is."""

import copy
import pickle
import types

import pytest
import torch
import transformers

from golden_folders import GOLDEN_NAMES, golden_tensors, read_manifest, write_golden
from hf_training import load_model, write_two_depths
from torpor.checkpoints.families import find_family
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.inspect import inspect_folder
from torpor.checkpoints.verify import verify_folders
from torpor.errors import CheckpointError, ConfigError, UnsupportedModelError
from torpor.huggingface import keep_mtp

# The manifest of the vision-language folder has only a token of a vision part.
NATIVE = [
    name
    for name in GOLDEN_NAMES
    if find_family(read_manifest(name)["config"]).has_transformers and name != "qwen3_5_vl"
]


@pytest.fixture
def source(tmp_path):
    """A folder of a dense family, with one MTP layer."""
    return write_golden(tmp_path / "source", "qwen3_5")


@pytest.fixture
def model(source):
    """Its trunk, tuned a little."""
    model = load_model(source)
    change(model)
    return model


def change(model) -> None:
    """Move every tensor."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)


def test_without_it_heads_are_lost(source, model, tmp_path):
    """What Transformers writes by itself: a count in config.json and nothing that it counts."""
    model.save_pretrained(tmp_path / "saved")
    result = verify_folders(source, tmp_path / "saved")
    assert not result.ok
    assert len(result.mtp_names("missing")) == len(result.mtp) == 15
    assert (result.export_count.declared, result.export_count.physical, result.export_count.written) == (
        1,
        0,
        0,
    )
    assert not inspect_folder(tmp_path / "saved").ok


def test_saved_again_and_again(source, model, tmp_path):
    """In one file, in many, in one again, each time after more training, into the same folder."""
    keep_mtp(model, source)
    for size in ("1GB", "50KB", "1GB", "80KB", "50KB"):
        change(model)
        model.save_pretrained(tmp_path / "saved", max_shard_size=size)
        result = verify_folders(source, tmp_path / "saved")
        assert result.ok, size
        assert result.trunk_changed == result.trunk_tensors
        saved = load_model(tmp_path / "saved").state_dict()
        assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


def test_copies_follow_the_trunk(tmp_path):
    """What the MTP layer has of the trunk's is the trained trunk's; routed experts come out as they were."""
    source = write_golden(tmp_path / "source", "deepseek_v3")
    model = load_model(source)
    change(model)
    keep_mtp(model, source)
    model.save_pretrained(tmp_path / "saved")
    result, saved = verify_folders(source, tmp_path / "saved"), open_folder(tmp_path / "saved")
    assert result.ok
    assert len(result.copies) == 2
    for copied, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        of_layer = saved.read_bytes(f"model.layers.3.{copied}.weight")
        assert of_layer == saved.read_bytes(f"{original}.weight")
        assert of_layer != golden_tensors("deepseek_v3")[f"{original}.weight"][2]


@pytest.mark.parametrize("family", NATIVE)
def test_every_family(tmp_path, family):
    """Whatever Transformers renames, splits or leaves out of the configuration, the folder verifies."""
    source = write_golden(tmp_path / "source", family)
    model = load_model(source)
    keep_mtp(model, source)
    model.save_pretrained(tmp_path / "saved")
    assert verify_folders(source, tmp_path / "saved").ok
    assert inspect_folder(tmp_path / "saved").ok


def test_two_mtp_layers(tmp_path):
    """As many as the source has."""
    source = write_two_depths(tmp_path / "source")
    model = load_model(source)
    keep_mtp(model, source)
    model.save_pretrained(tmp_path / "saved")
    result = verify_folders(source, tmp_path / "saved")
    assert result.ok
    assert result.export_count.written == 2


def test_inside_a_larger_model(tmp_path):
    """The language model of a vision-language folder, tuned alone under its shorter names."""
    source = write_golden(tmp_path / "source", "qwen3_5_vl")
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(source, dtype="auto")
    keep_mtp(model, source)
    model.save_pretrained(tmp_path / "saved")
    assert inspect_folder(tmp_path / "saved").ok
    saved, before = open_folder(tmp_path / "saved"), open_folder(source)
    heads = [name for name in before.tensors if name.startswith("mtp.")]
    assert heads
    assert all(saved.read_bytes(name) == before.read_bytes(name) for name in heads)


def test_other_models_are_saved_as_ever(source, model, tmp_path):
    """The hook belongs to one model and not to its class."""
    keep_mtp(model, source)
    load_model(source).save_pretrained(tmp_path / "other")
    assert sorted(file.name for file in (tmp_path / "other").glob("*.safetensors")) == ["model.safetensors"]


def test_copied_and_pickled_models(source, model, tmp_path):
    """Reference models are deep copies, and spawned processes get pickles: each saves its own weights."""
    keep_mtp(model, source)
    for name, twin in (("copy", copy.deepcopy(model)), ("pickle", pickle.loads(pickle.dumps(model)))):
        change(twin)
        twin.save_pretrained(tmp_path / name)
        assert verify_folders(source, tmp_path / name).ok
        saved = load_model(tmp_path / name).state_dict()
        assert all(torch.equal(tensor, saved[key]) for key, tensor in twin.state_dict().items())


def test_only_the_writing_process_writes(source, model, tmp_path):
    """A process that is not the main one leaves the folder to the one that is."""
    keep_mtp(model, source)
    model.save_pretrained(tmp_path / "saved", is_main_process=False)
    assert not list((tmp_path / "saved").iterdir())


def test_hub(source, model, tmp_path, monkeypatch):
    """`push_to_hub` uploads a whole folder; `save_pretrained(push_to_hub=True)` would not, and is refused."""
    from transformers.utils import hub

    class Api:
        def create_repo(self, repo_id, **_):
            return type("Url", (), {"repo_id": repo_id})

    uploaded = []
    monkeypatch.setattr(hub, "hf_api", lambda *_, **__: Api())
    card = types.SimpleNamespace(save=lambda _: None)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: card)
    monkeypatch.setattr(
        type(model),
        "_upload_modified_files",
        lambda self, folder, *_, **__: uploaded.append(verify_folders(source, folder).ok),
    )
    keep_mtp(model, source)
    model.push_to_hub("somebody/something")
    assert uploaded == [True]
    with pytest.raises(ConfigError, match="uploads before MTP layers"):
        model.save_pretrained(tmp_path / "saved", push_to_hub=True)
    assert not (tmp_path / "saved").exists()


def test_source_is_not_overwritten(source, model, tmp_path):
    """The only heads there are would be gone before they could be put back; by whatever name it is called."""
    keep_mtp(model, source)
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    (tmp_path / "link").symlink_to(source)
    for path in (source, tmp_path / "link", str(source / "..") + "/source"):
        with pytest.raises(ConfigError, match="is the folder that the MTP layers are taken from"):
            model.save_pretrained(path)
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before


def test_variants(source, model, tmp_path):
    """Their files have names of their own: beside an earlier save, whose heads are whole, they had none."""
    keep_mtp(model, source)
    with pytest.raises(ConfigError, match="variant='fp16'"):
        model.save_pretrained(tmp_path / "saved", variant="fp16")
    assert not (tmp_path / "saved").exists()


def test_working_directory_changes(source, model, tmp_path, monkeypatch):
    """A relative path means what it meant when it was given."""
    monkeypatch.chdir(tmp_path)
    keep_mtp(model, "source")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model.save_pretrained(tmp_path / "saved")
    assert verify_folders(source, tmp_path / "saved").ok


def test_a_checkpoint_after_an_interruption(source, model, tmp_path, caplog):
    """Whoever catches it and saves under the name of a checkpoint hears if heads are missing."""
    keep_mtp(model, source)
    model.save_pretrained.trainer_state = transformers.TrainerState(global_step=3)
    source.rename(tmp_path / "elsewhere")
    model.save_pretrained(tmp_path / "checkpoint-3")
    assert "checkpoint-3 was saved without its MTP layers" in caplog.text
    with pytest.raises(CheckpointError, match="does not exist"):
        model.save_pretrained(tmp_path / "checkpoint-4")


def test_vocabulary_that_has_grown(source, model, tmp_path):
    """Refused at once, or, where it grows later, when the folder is saved; its trunk is there then."""
    keep_mtp(model, source)
    model.resize_token_embeddings(130)
    with pytest.raises(CheckpointError, match=r"the model has vocab_size 130, .* has 128"):
        keep_mtp(model, source)
    with pytest.raises(CheckpointError, match=r"has vocab_size 130, .* has 128"):
        model.save_pretrained(tmp_path / "saved")
    assert load_model(tmp_path / "saved").config.vocab_size == 130


def test_what_cannot_be_kept(source, model, tmp_path):
    """No Transformers model, a family that is not known, a source that is none: refused before training."""
    with pytest.raises(ConfigError, match="is a Linear, needs a Transformers model"):
        keep_mtp(torch.nn.Linear(1, 1), source)
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
    )
    llama = transformers.LlamaForCausalLM(config)
    with pytest.raises(UnsupportedModelError, match="'llama'"):
        keep_mtp(llama, source)
    assert "save_pretrained" not in vars(llama)
    with pytest.raises(CheckpointError, match="does not exist"):
        keep_mtp(model, "Qwen/Qwen3.5-4B")
    headless = write_golden(tmp_path / "headless", "qwen3_5", heads=False)
    with pytest.raises(CheckpointError, match="has no MTP layers"):
        keep_mtp(model, headless)


def test_adapters(source, model, tmp_path, caplog):
    """Saved alone they have no trunk, which is said once; merged they make a whole folder."""
    import peft

    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=2))
    for _ in range(2):
        keep_mtp(wrapped, source)
    assert [record.message for record in caplog.records if "no trunk" in record.message] == [
        "adapters are saved without MTP layers: they have no trunk; merged saves have them"
    ]
    wrapped.save_pretrained(tmp_path / "adapter")
    assert {file.name for file in (tmp_path / "adapter").glob("*.safetensors")} == {
        "adapter_model.safetensors"
    }
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    wrapped.merge_and_unload().save_pretrained(tmp_path / "merged")
    result = verify_folders(source, tmp_path / "merged")
    assert result.ok
    assert result.trunk_changed == result.trunk_tensors


def test_adapters_without_a_wrapper(source, model, tmp_path, caplog, monkeypatch):
    """Transformers' own adapters are saved as adapters."""
    import peft

    # Transformers 5.24 asks for PEFT 0.22, which has not been released.
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], r=2))
    keep_mtp(model, source)
    model.save_pretrained(tmp_path / "adapter")
    assert "it holds adapters, which have no trunk" in caplog.text
    assert not (tmp_path / "adapter" / "model.safetensors.index.json").exists()


def test_weights_that_were_not_gathered(source, model, tmp_path, caplog):
    """An empty state dict is how a Trainer says that they are elsewhere."""
    keep_mtp(model, source)
    model.save_pretrained(tmp_path / "saved", state_dict={})
    assert "they were not gathered" in caplog.text
