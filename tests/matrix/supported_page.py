"""Writes docs/supported.md from the table of cases: `python tests/matrix/supported_page.py`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from matrix.cases import LAYOUTS, MODELS, OPTIMIZERS, RECOMPUTE, Outcome, all_cases, outcome

PAGE = Path(__file__).parents[2] / "docs" / "supported.md"

_HEAD = """# Models and layouts that can be put to sleep

This page is written from the table that the tests run
([`tests/matrix/cases.py`](../tests/matrix/cases.py)) by `python tests/matrix/supported_page.py`, and a test
fails where the two differ.

**yes** means: logits, losses, every gradient of the trunk after `finalize_model_grads`, gradient norms, the
trunk after three optimizer steps and all copies of a shared embedding equal, bit for bit, those of the same
layout of a model built without MTP from the same trunk weights; and MTP itself is unchanged to the bit. It is
said of {choices} combinations: recomputation {recompute}; Megatron's optimizer
{optimizers}.

Only the gradient norm is compared within a tolerance in two places, where the same squares are summed in
another order: with MTP on another stage than the loss (Megatron then puts the final norm behind the last
decoder layer) and with the distributed optimizer where a stage's buffer holds an embedding copy that a model
without MTP lacks. Two such norms over N parameters are at most N x 2^-24 apart, relative to the norm.

`make test-matrix` runs all {count} cases, `make test` a part of them in which every pair of choices meets.
"""


def page() -> str:
    """Return the page as it has to be."""
    cases = list(all_cases())
    notes: dict[Outcome, int] = {}
    lines = ["| layout | " + " | ".join(str(model) for model in MODELS) + " |"]
    lines.append("|---|" + "---|" * len(MODELS))
    for layout in LAYOUTS:
        cells = []
        for model in MODELS:
            result = outcome(model, layout)
            if result.kind == "supported":
                cells.append("yes")
            else:
                cells.append(f"{result.kind} ({notes.setdefault(result, len(notes) + 1)})")
        text = layout.text.replace("|", "\\|")
        lines.append(f"| {text} | " + " | ".join(cells) + " |")
    head = _HEAD.format(
        choices=len(RECOMPUTE) * len(OPTIMIZERS),
        recompute=", ".join(RECOMPUTE),
        optimizers=", ".join(str(choice) for choice in OPTIMIZERS),
        count=len(cases),
    )
    models = [f"- `{model}`: {text}" for model, text in MODELS.items()]
    reasons = [f"{number}. {result.kind}: {result.text}" for result, number in notes.items()]
    return "\n".join([head, *models, "", *lines, "", *reasons]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
