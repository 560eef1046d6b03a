"""docs/supported.md says what the tests run."""

from matrix.supported_page import PAGE, page


def test_the_page_is_not_stale():
    """`python tests/matrix/supported_page.py` writes it anew."""
    assert PAGE.read_text() == page()


def test_every_refusal_and_gap_has_a_reason():
    """No cell is anything but yes without saying why."""
    rows = [line for line in page().splitlines() if line.startswith("| ")][1:]
    cells = {cell.strip() for row in rows for cell in row.strip("| ").split(" | ")[1:]}
    assert {cell.split(" (")[0] for cell in cells} == {"yes", "refused", "n/a"}
    reasons = [line for line in page().splitlines() if line[0:1].isdigit()]
    assert {int(cell.split("(")[1].rstrip(")")) for cell in cells - {"yes"}} == set(
        range(1, len(reasons) + 1)
    )
    assert all(len(reason.split(": ", 1)[1]) > 20 for reason in reasons)
