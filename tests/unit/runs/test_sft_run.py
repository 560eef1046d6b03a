"""Whole fine-tuning runs on one rank: learning, LoRA, resuming, and what is refused before the first step."""

import json
import shutil

import pytest
import torch
import yaml

import tiny
from builds import record_impls
from chats import CHATML, chat, chat_tokenizer, give_chat, write_records
from torpor.checkpoints.folder import open_folder
from torpor.errors import ConfigError, MTPChangedError, UnsupportedModelError
from torpor.runs.sft import sft
from torpor.training.config import SftConfig
from torpor.training.config_file import read_config

ANSWERS = {"cat": "meow", "dog": "woof", "owl": "hoot", "cow": "moo!"}
RECORDS = [chat(f"What says a {animal}?", sound) for animal, sound in ANSWERS.items()] * 8
VALUES = {
    "model": "model",
    "output": "run",
    "data": "chat.jsonl",
    "sequence_length": 160,
    "global_batch_size": 2,
    "steps": 2,
    "lr": 1e-2,
    "dtype": "fp32",
    "held_out": 0.1,
    "eval_batches": 1,
}
LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    give_chat(tiny.write_mimo(folder / "mimo", seed=1))
    give_chat(tiny.write_nemotron_h(folder / "nemotron_h", seed=1))
    return folder


@pytest.fixture
def work(tmp_path, models, no_process_groups):
    shutil.copytree(models / "mimo", tmp_path / "model")
    write_records(tmp_path / "chat.jsonl", RECORDS)
    return tmp_path


def run(work, **changes):
    (work / "run.yaml").write_text(yaml.safe_dump(VALUES | changes))
    return sft(read_config(SftConfig, work / "run.yaml"))


def digests(folder):
    opened = open_folder(folder)
    return {name: opened.sha256(name) for name in opened.tensors}


def heads(digests):
    return {name: digest for name, digest in digests.items() if "mtp" in name}


def answer(model, prompt: str) -> str:
    """What Transformers' own model of an export says, greedily."""
    tokenizer = chat_tokenizer()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    begin = ids.shape[1]
    with torch.no_grad():
        while ids.shape[1] < begin + 8 and ids[0, -1] != end:
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    return tokenizer.decode(ids[0, begin:])


def test_a_model_learns_to_answer_with_its_heads_asleep(work):
    result = run(work, steps=40, warmup_steps=4)
    assert result.first_loss > 4
    assert result.last_loss < 0.1
    assert (result.mtp_executions, result.frozen) == (0, True)
    before, after = digests(work / "model"), digests(work / "run" / "export")
    assert before.keys() == after.keys()
    assert heads(before) == heads(after)
    assert result.mtp_tensors == len(heads(before)) > 0
    model = tiny.load_reference(work / "run" / "export")
    assert {animal: answer(model, f"What says a {animal}?") for animal in ANSWERS} == {
        animal: f"{sound}<|im_end|>" for animal, sound in ANSWERS.items()
    }
    assert (work / "run" / "export" / "tokenizer.json").exists()
    assert run(work, steps=40, warmup_steps=4) == result  # a finished run answers again


def loss_of_export(work) -> float:
    """The held-out loss of a run, computed anew with the model that it exported."""
    from torpor.megatron import parallel
    from torpor.megatron.models import build_model
    from torpor.megatron.parallel import Layout
    from torpor.megatron.weights import load_weights
    from torpor.training.data import load_tokenizer
    from torpor.training.samples import prepare_rows
    from torpor.training.sources import find_sources

    config = read_config(SftConfig, work / "run.yaml")
    rows = prepare_rows(
        find_sources(config.data),
        load_tokenizer(config.model),
        vocab_size=320,
        folder=config.output / "tokens",
        settings=config,
    )
    parallel.initialize(Layout(), seed=1)
    folder = open_folder(config.output / "export")
    chunks = build_model(folder.config, Layout(), torch.float32, mtp=False)
    whole = build_model(folder.config, Layout(), torch.float32)
    load_weights(whole, folder)
    chunks[0].load_state_dict({k: v for k, v in whole[0].state_dict().items() if not k.startswith("mtp.")})
    total = count = 0.0
    with torch.no_grad():
        for row in [int(rows.held_out[i % len(rows.held_out)]) for i in range(config.global_batch_size)]:
            from torpor.training.sft import _packed_seq_params

            batch = rows.batch([row], torch.device("cpu"))
            losses = chunks[0].eval()(
                batch.tokens_BS,
                batch.positions_BS,
                None,
                labels=batch.labels_BS,
                packed_seq_params=_packed_seq_params(batch.cu_seqlens),
            )
            total += (losses * batch.loss_mask_BS).sum().item()
            count += batch.loss_mask_BS.sum().item()
    parallel.shutdown()
    return total / count


def test_latent_experts_get_no_adapters(work, monkeypatch):
    monkeypatch.setattr("torpor.megatron.capabilities.has_transformer_engine", lambda: True)
    shutil.rmtree(work / "model")
    give_chat(tiny.write_nemotron_h(work / "model", moe_latent_size=16))
    with pytest.raises(UnsupportedModelError, match=r"`model`.*moe_latent_size = 16(?s:.*)adapters"):
        run(work, lora=LORA)
    assert not (work / "run").exists()


@pytest.mark.parametrize(("lora", "kind"), [(LORA, "local"), (None, "transformer_engine")])
def test_a_model_with_adapters_is_built_of_local_layers(work, monkeypatch, lora, kind):
    built = record_impls(monkeypatch)
    run(work, steps=1, lora=lora)
    assert built == [kind]


@pytest.mark.parametrize("family", ["mimo", "nemotron_h"])
def test_adapters_learn_and_are_merged_into_the_export(work, models, family, capsys):
    shutil.rmtree(work / "model")
    shutil.copytree(models / family, work / "model")
    result = run(work, steps=12, lora=LORA, recompute="full", weight_decay=0.0)
    assert result.last_loss < result.first_loss - 1
    before, after = digests(work / "model"), digests(work / "run" / "export")
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        name
        for name in before
        if "mtp" not in name
        and name.rsplit(".", 2)[-2]
        in (
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
            "in_proj",
            "out_proj",
        )
        and name.endswith(".weight")
        and ".experts." not in name
    }
    assert result.trunk_changed == len(changed)
    assert result.mtp_tensors == len(heads(before))
    assert loss_of_export(work) == pytest.approx(result.held_out["loss"], rel=1e-4)
    assert not (work / "run" / "merged").exists()
    assert "MTP layers, routed experts, embedding and output layer get none" in capsys.readouterr().err


@pytest.mark.parametrize("lora", [None, LORA | {"lora_dropout": 0.2}], ids=["full", "lora"])
def test_an_interrupted_run_continues_bit_for_bit(work, lora):
    values = {"steps": 4, "save_every": 2, "lora": lora, "keep": 2}
    run(work, **values)
    whole = work / "run"
    # What a kill after the first checkpoint leaves.
    broken = work / "broken"
    shutil.copytree(
        whole, broken, ignore=shutil.ignore_patterns("export*", "*ry.json", "dormancy.json", "verify.json")
    )
    shutil.rmtree(broken / "checkpoints" / "step_00000004")
    (broken / "checkpoints" / "latest").write_text("step_00000002\n")
    result = run(work, output="broken", **values)
    assert result.resumed_from == 2
    assert digests(broken / "export") == digests(whole / "export")


def test_heads_can_be_trained_along(work):
    result = run(work, freeze_mtp=False)
    assert not result.frozen
    assert heads(digests(work / "model")) != heads(digests(work / "run" / "export"))


def refuse(work, *parts, kind=ConfigError, **changes):
    (work / "run.yaml").write_text("")
    before = sorted(work.rglob("*"))
    with pytest.raises(kind) as caught:
        run(work, **changes)
    for part in parts:
        assert part in str(caught.value)
    assert sorted(work.rglob("*")) == before


def test_what_is_refused_leaves_nothing(work):
    refuse(work, "`model`", "nowhere does not exist", model="nowhere")
    refuse(work, "`packing`", "`micro_batch_size` is 2", micro_batch_size=2)
    refuse(work, "`lora`", "`freeze_mtp` is False", lora=LORA, freeze_mtp=False)
    refuse(work, "`lora.target_modules`", lora=LORA | {"target_modules": ["c_attn"]})
    refuse(work, "`lora.target_modules` is missing", lora={"r": 4})
    refuse(work, "`lora.rank`", "did you mean `lora.r`", lora=LORA | {"rank": 4})
    refuse(
        work, "`lora.target_modules` is 'q_proj'", "a list of names", lora=LORA | {"target_modules": "q_proj"}
    )
    refuse(work, "longer than sequence_length 8", "chat.jsonl:1", sequence_length=8)
    refuse(work, "`excess_length_strategy` is 'wrap'", "'drop'", excess_length_strategy="wrap")
    write_records(work / "chat.jsonl", [{"text": "no response"}])
    refuse(work, "chat.jsonl:1", "`text`")
    write_records(work / "chat.jsonl", [*RECORDS, chat("only a question")])
    refuse(work, "chat.jsonl:33", "no message of the role assistant")
    write_records(work / "chat.jsonl", RECORDS)
    give_chat(work / "model", None)
    (work / "model" / "chat_template.jinja").unlink(missing_ok=True)
    refuse(work, "has no chat template", "chat_template.jinja")


def test_a_folder_of_another_command_is_refused(work):
    run(work)
    record = work / "run" / "run.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"command": "distill"}))
    with pytest.raises(ConfigError, match="holds a run of `torpor distill`"):
        run(work)


def test_heads_that_changed_during_the_run_are_not_exported(work, monkeypatch):
    from torpor.training import loop

    real = loop.run_step

    def damage(job, step):
        record = real(job, step)
        with torch.no_grad():
            parameters = dict(job.chunks[0].module.named_parameters())
            next(p for name, p in parameters.items() if name.startswith("mtp.")).view(-1)[0] += 1
        return record

    monkeypatch.setattr(loop, "run_step", damage)
    with pytest.raises(MTPChangedError, match="changed while asleep"):
        run(work)
    assert not (work / "run" / "export").exists()


def test_a_template_in_the_folder_counts(work):
    """The same records under another template are other samples."""
    run(work)
    (work / "model" / "chat_template.jinja").write_text(CHATML.replace("<|im_end|>\n", "<|im_end|>"))
    with pytest.raises(ConfigError, match="other settings or inputs: `data`"):
        run(work)
