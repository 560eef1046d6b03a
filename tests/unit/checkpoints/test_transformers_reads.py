"""Transformers, where it has a family's class, loads exported and grafted folders without a complaint.

Nothing is missing, and nothing unexpected is there but MTP tensors.
"""

import pytest

from golden_folders import GOLDEN_NAMES, golden_tensors, read_manifest, write_golden
from torpor.checkpoints.families import find_family
from torpor.checkpoints.graft import graft_folder

# The manifest of the vision-language folder has only a token of a vision part.
NATIVE = [
    name
    for name in GOLDEN_NAMES
    if find_family(read_manifest(name)["config"]).has_transformers and name != "qwen3_5_vl"
]


def load(path):
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)


@pytest.mark.parametrize("name", NATIVE)
def test_loads(tmp_path, name):
    """The trunk is whole, and what Transformers does not want is MTP."""
    source = write_golden(tmp_path / "source", name)
    tuned = write_golden(tmp_path / "tuned", name, seed=1, heads=False)
    graft_folder(source, tuned, tmp_path / "out")
    for path, seed in ((source, 0), (tmp_path / "out", 1)):
        _, info = load(path)
        assert not info["missing_keys"], (path, seed)
        # By the names of Transformers' own model, in which experts are stacked.
        config = read_manifest(name)["config"]
        assert all(find_family(config).is_mtp(key, config) for key in info["unexpected_keys"])
        assert not info["mismatched_keys"]


def draft(path) -> list[list[int]]:
    """Everything that Transformers' own MTP decoding proposes and accepts, step by step."""
    import torch
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    model, _ = load(path)
    # Transformers knows the MTP layer by its number in the published models, and this one is smaller.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\..*"]
    steps = []
    propose, update = MTPCandidateGenerator.get_candidates, MTPCandidateGenerator.update_candidate_strategy

    def get_candidates(self, *args, **kwargs):
        ids, logits = propose(self, *args, **kwargs)
        steps.append(ids[0].tolist())
        return ids, logits

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        steps.append([int(num_matches)])
        return update(self, input_ids, scores, num_matches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MTPCandidateGenerator, "get_candidates", get_candidates)
        patch.setattr(MTPCandidateGenerator, "update_candidate_strategy", update_candidate_strategy)
        ids = torch.tensor([[5, 17, 3, 99, 42, 7]])
        model.generate(ids, max_new_tokens=12, do_sample=False, use_mtp=True, pad_token_id=0)
    return steps


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_drafts_with_the_heads(tmp_path, name):
    """Grafted heads propose what the source's propose, and as many are accepted; other heads would differ."""
    source = write_golden(tmp_path / "source", name)
    lost = write_golden(tmp_path / "lost", name, heads=False)
    graft_folder(source, lost, tmp_path / "out")
    other = golden_tensors(name, seed=9)
    changed = write_golden(
        tmp_path / "changed",
        name,
        change=lambda t: {n: other[n] if n.endswith(("eh_proj.weight", "norm.weight")) else t[n] for n in t},
    )
    expected = draft(source)
    assert len(expected) > 4
    assert draft(tmp_path / "out") == expected
    assert draft(changed) != expected
