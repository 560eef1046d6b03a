"""The page on reinforcement learning: its code runs as it stands, from top to bottom."""

import re
from pathlib import Path

import pytest
import torch

from tiny_models import GPT_MOE, SEQUENCE, VOCAB, build

PAGE = Path(__file__).parents[2] / "docs" / "rl.md"


def blocks():
    """Python code on the page, with blank lines before it so that errors name lines of the page."""
    text = PAGE.read_text()
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield "\n" * text[: match.start(1)].count("\n") + match[1]


@pytest.fixture
def namespace(megatron_rank):
    """What the page takes as given."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_router_replay_instances()
    model = build(GPT_MOE, moe_enable_routing_replay=True)
    reference = build(GPT_MOE, seed=2)
    tokens = torch.randint(0, VOCAB, (2, SEQUENCE), generator=torch.Generator().manual_seed(0))
    batches = [
        {
            "tokens": row[None],
            "old_log_probs": torch.zeros(1, SEQUENCE),
            "advantages": torch.ones(1, 1),
            "mask": torch.ones(1, SEQUENCE),
        }
        for row in tokens
    ]
    yield {"model": model, "reference": reference, "tokens": tokens, "batches": batches}
    RouterReplay.clear_global_router_replay_instances()


def test_its_code_runs(namespace):
    """Every block, in one namespace; and what it says of the results."""
    for block in blocks():
        exec(compile(block, str(PAGE), "exec"), namespace)
    assert namespace["old_log_probs"].shape == namespace["tokens"].shape
    assert namespace["old_log_probs"][:, 0].tolist() == [0, 0]
    assert len(namespace["reports"]) == 2
    assert namespace["values"]["log_probs"][0, [0, 5, 14]].tolist() == [0, 0, 0]
    assert len(namespace["batches"][0]["routes"]) == namespace["model"].config.num_layers
    assert namespace["report"].num_tensors > 0
    namespace["reference_handle"].check()


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
