"""Tiny random Hugging Face folders with MTP layers, named and laid out as the published ones are.

The trunks come from Transformers' own classes, so their names on disk are Transformers' and not ours; the MTP
tensors, which Transformers drops, are added beside them. `load_reference` gives Transformers' own model of a
folder's trunk, to compare logits with.
"""

import functools
import json
import math
import tempfile
from pathlib import Path

import torch

_TEXT = "The dormouse sleeps through the winter and wakes with the same whiskers it had in autumn. " * 4
_SPECIAL = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}


def write_nemotron_h(
    path,
    *,
    pattern: str = "M*-E",
    mtp_pattern: str = "*E",
    num_mtp: int = 1,
    dtype: torch.dtype = torch.float32,
    hidden: int = 32,
    vocab: int = 320,
    seed: int = 0,
    tokenizer: bool = True,
    shards: int = 2,
    **overrides,
) -> Path:
    """Write a hybrid folder: trunk `backbone.*`, MTP `mtp.layers.{depth * len(mtp_pattern) + j}.*`.

    Four attention heads in two groups, four Mamba heads in two groups and four experts: TP2 and EP2 fit.

    Args:
        path: Folder to create.
        pattern: Trunk layers: M Mamba, * attention, - MLP, E mixture of experts.
        mtp_pattern: Layers of one MTP depth, same letters.
        num_mtp: Depths; 0 writes no MTP tensor and declares none.
        dtype: Of every tensor but the router's correction bias, which is float32 as in published folders.
        hidden: Hidden size, a multiple of 8.
        vocab: Rows of the embedding; at least 259 with a tokenizer.
        seed: Of all values.
        tokenizer: Whether to write a byte-level BPE tokenizer.
        shards: Safetensors files; 1 writes `model.safetensors` without an index.
        **overrides: Configuration fields to replace, such as `moe_latent_size=16` or `mlp_bias=True`.

    Returns:
        `path`.
    """
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "chunk_size": 16,
        "conv_kernel": 4,
        "eos_token_id": 2,
        "expand": 2,
        "head_dim": hidden // 4,
        "hidden_size": hidden,
        "hybrid_override_pattern": pattern,
        "intermediate_size": 48,
        "layer_norm_epsilon": 1e-05,
        "mamba_head_dim": hidden // 2,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 4,
        "mamba_proj_bias": False,
        "max_position_embeddings": 256,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "model_type": "nemotron_h",
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "n_group": 1,
        "n_groups": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": len(pattern),
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "residual_in_fp32": False,
        "routed_scaling_factor": 2.5,
        "ssm_state_size": 8,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_bias": False,
        "use_conv_bias": True,
        "vocab_size": vocab,
    }
    if num_mtp:
        config |= {"mtp_hybrid_override_pattern": mtp_pattern, "num_nextn_predict_layers": num_mtp}
    config |= overrides

    shapes = _transformers_shapes("NemotronH", config)
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]  # Transformers cannot tie this family and writes it all the same
    if num_mtp:
        # The layers of all depths are an ordinary stack; Transformers' trunk of it names and sizes them.
        layers = mtp_pattern * num_mtp
        stack = config | {"hybrid_override_pattern": layers, "num_hidden_layers": len(layers)}
        prefix = "backbone.layers."
        for name, shape in _transformers_shapes("NemotronH", stack).items():
            if name.startswith(prefix):
                shapes["mtp.layers." + name.removeprefix(prefix)] = shape
        for depth in range(num_mtp):
            first, last = depth * len(mtp_pattern), (depth + 1) * len(mtp_pattern) - 1
            shapes[f"mtp.layers.{first}.enorm.weight"] = (hidden,)
            shapes[f"mtp.layers.{first}.hnorm.weight"] = (hidden,)
            shapes[f"mtp.layers.{first}.eh_proj.weight"] = (hidden, 2 * hidden)
            shapes[f"mtp.layers.{last}.final_layernorm.weight"] = (hidden,)
    return _write(Path(path), config, shapes, dtype, seed, tokenizer, shards)


def write_mimo(
    path,
    *,
    layers: int = 2,
    num_mtp: int = 1,
    tie_word_embeddings: bool = False,
    dtype: torch.dtype = torch.float32,
    hidden: int = 32,
    vocab: int = 320,
    seed: int = 0,
    tokenizer: bool = True,
    shards: int = 2,
    **overrides,
) -> Path:
    """Write a dense folder: a Qwen2 trunk, biases on q, k and v, MTP under `model.mtp_layers.{depth}.`.

    Args:
        path: Folder to create.
        layers: Trunk layers.
        num_mtp: MTP depths; 0 writes none and declares none.
        tie_word_embeddings: Whether the output layer is the embedding; then `lm_head.weight` is not on disk.
        dtype: Of every tensor.
        hidden: Hidden size, a multiple of 8.
        vocab: Rows of the embedding; at least 259 with a tokenizer.
        seed: Of all values.
        tokenizer: Whether to write a byte-level BPE tokenizer.
        shards: Safetensors files; 1 writes `model.safetensors` without an index.
        **overrides: Configuration fields to replace.

    Returns:
        `path`.
    """
    config = {
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": hidden // 4,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "model_type": "mimo",
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "rope_theta": 640000,
        "sliding_window": None,
        "tie_word_embeddings": tie_word_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_sliding_window": False,
        "vocab_size": vocab,
    }
    if num_mtp:
        config["num_nextn_predict_layers"] = num_mtp
    config |= overrides

    shapes = _transformers_shapes("Qwen2", config)
    # An MTP layer holds one ordinary decoder layer, whose names and sizes Transformers gives.
    for name, shape in _transformers_shapes("Qwen2", config | {"num_hidden_layers": num_mtp}).items():
        if name.startswith("model.layers."):
            shapes[name.replace("model.layers.", "model.mtp_layers.")] = shape
    for depth in range(num_mtp):
        prefix = f"model.mtp_layers.{depth}"
        for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (hidden,)
        shapes[f"{prefix}.input_proj.weight"] = (hidden, 2 * hidden)
    return _write(Path(path), config, shapes, dtype, seed, tokenizer, shards)


def load_reference(path, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Load the trunk of a folder written above into Transformers' own model, in eval mode."""
    from safetensors.torch import load_file

    path = Path(path)
    config = json.loads((path / "config.json").read_text())
    _quiet_transformers()
    import transformers

    kind = "NemotronH" if config["model_type"] == "nemotron_h" else "Qwen2"
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    dtype = dtype or getattr(torch, config["torch_dtype"])
    if kind == "NemotronH":
        model = model_class.from_pretrained(path, dtype=dtype)
        if config["tie_word_embeddings"]:
            model.lm_head.weight = model.model.embeddings.weight
        return model.eval()
    # Transformers has no class for MiMo-7B, whose trunk is a Qwen2 model.
    model = model_class(_transformers_config(kind, config)).to(dtype)
    tensors = {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}
    trunk = {k: v for k, v in tensors.items() if not k.startswith("model.mtp_layers.")}
    missing, unexpected = model.load_state_dict(trunk, strict=False)
    assert not unexpected, unexpected
    assert missing == (["lm_head.weight"] if config["tie_word_embeddings"] else []), missing
    return model.eval()


def _quiet_transformers() -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _transformers_config(kind: str, config: dict):
    import transformers

    fields = {k: v for k, v in config.items() if k not in ("model_type", "architectures", "torch_dtype")}
    return getattr(transformers, f"{kind}Config")(**fields)


def _transformers_shapes(kind: str, config: dict) -> dict[str, tuple[int, ...]]:
    """What Transformers writes for this configuration: name on disk and shape."""
    return dict(_saved_shapes(kind, json.dumps(config, sort_keys=True)))


@functools.lru_cache
def _saved_shapes(kind: str, config_json: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    import transformers
    from safetensors import safe_open

    _quiet_transformers()
    config = _transformers_config(kind, json.loads(config_json))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            return tuple((name, tuple(file.get_slice(name).get_shape())) for name in sorted(file.keys()))


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Values at which every kind of tensor matters to the logits and none saturates."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return 0.05 * noise
    if name.endswith("A_log"):
        return torch.log(1 + 3 * torch.rand(shape, generator=generator))
    if name.endswith("dt_bias"):
        return 0.5 * noise - 1
    if name.endswith(".bias"):
        return 0.1 * noise
    if len(shape) == 1:  # norms and Mamba's D
        return 1 + 0.1 * noise
    return noise / math.sqrt(math.prod(shape[1:]))


def _write(path, config, shapes, dtype, seed, tokenizer, shards) -> Path:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        kept = torch.float32 if name.endswith("e_score_correction_bias") else dtype
        tensors[name] = _random(name, shape, generator).to(kept)

    path.mkdir(parents=True)
    names = sorted(tensors)
    size = math.ceil(len(names) / shards)
    weight_map = {}
    for i in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * size : (i + 1) * size]
        save_file({n: tensors[n] for n in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        total = sum(t.nbytes for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (path / "generation_config.json").write_text(json.dumps(generation) + "\n")
    if tokenizer:
        (path / "tokenizer.json").write_text(_tokenizer_json(config["vocab_size"]))
        words = _SPECIAL | {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 256}
        (path / "tokenizer_config.json").write_text(json.dumps(words, indent=2) + "\n")
    return path


@functools.lru_cache
def _tokenizer_json(vocab: int) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab < len(alphabet) + len(_SPECIAL):
        raise ValueError(f"a byte-level tokenizer needs 259 words, the model has {vocab}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(_SPECIAL.values()),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return tokenizer.to_str()
