"""Every model at every layout: asleep, it equals to the bit the same layout of a model built without MTP.

`make test` runs a pairwise cover of the table in cases.py, `make test-matrix` all of it. Cases of one layout
share a launch, since starting the ranks costs more than a case.
"""

import pytest

from matrix.cases import GPT, GPT_TIED, HYBRID_TIED, LAYOUTS, Case, all_cases
from matrix.pairwise import cover_pairs
from matrix.training import run_cases
from matrix.wrong_bypasses import edit_config_in_place, flip_mtp_process
from ranks.launch import run_ranks

CASES = list(all_cases())
COVER = frozenset(cover_pairs(CASES, lambda case: (case.model, case.layout, case.recompute, case.optimizer)))
MOST_IN_A_LAUNCH = 40


class Launches:
    """Runs the cases that this session has selected, many in one launch, when the first of them is wanted."""

    def __init__(self, cases):
        self.batches = {}
        for world in sorted({case.layout.world for case in cases}):
            same = [case for case in cases if case.layout.world == world]
            for start in range(0, len(same), MOST_IN_A_LAUNCH):
                batch = same[start : start + MOST_IN_A_LAUNCH]
                self.batches |= dict.fromkeys(batch, batch)
        self.results = {}

    def result(self, case):
        """Return what each rank found for a case, or raise what its launch raised."""
        if case not in self.results:
            batch = self.batches[case]
            try:
                ranks = run_ranks(run_cases, case.layout.world, batch, timeout=840)
                self.results |= {one: [found[str(one)] for found in ranks] for one in batch}
            except AssertionError as error:
                self.results |= dict.fromkeys(batch, error)
        result = self.results[case]
        if isinstance(result, AssertionError):
            raise result
        return result


@pytest.fixture(scope="session")
def launches(request):
    """One for the session: what is not selected is not run."""
    specs = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    selected = {spec.params["case"] for spec in specs if isinstance(spec.params.get("case"), Case)}
    return Launches([case for case in CASES if case in selected])


@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in COVER else pytest.mark.matrix, id=str(case)) for case in CASES],
)
def test_asleep_equals_built_without(case, launches):
    """Logits, losses, trunk gradients, grad norms, the trunk after three steps; and MTP as it was."""
    for found in launches.result(case):
        if case.outcome.kind == "refused":
            (message,) = found
            assert case.outcome.message in message
        else:
            assert found == []


@pytest.mark.ranks
@pytest.mark.parametrize("bypass", [flip_mtp_process, edit_config_in_place])
def test_wrong_bypasses_are_caught(bypass):
    """With tied weights on two stages the last one projects with a weight that nobody keeps in step."""
    pp2 = next(layout for layout in LAYOUTS if layout.name == "pp2")
    cases = [Case(GPT, pp2), Case(GPT_TIED, pp2), Case(HYBRID_TIED, pp2)]
    first, last = run_ranks(run_cases, 2, cases, bypass)
    for case in cases[1:]:
        assert any(entry.startswith("logits 0 by") for entry in last[str(case)])
        assert "grads of 0.embedding.word_embeddings.weight" in first[str(case)]
        # What weaker tests look at is in order.
        assert not any("copy of the embedding" in entry for entry in first[str(case)])
    # Untied models go through: only the whole matrix tells.
    assert first[str(cases[0])] == last[str(cases[0])] == []
