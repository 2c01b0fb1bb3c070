"""The list of campaigns, held against the folder."""

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "campaigns"


def commands_in_folder() -> set[str]:
    """Every campaign of the first level, and every folder below one that is a command by itself."""
    files = {path.stem for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    folders = {
        ".".join(path.parent.relative_to(FOLDER).parts)
        for path in FOLDER.rglob("__main__.py")
        if path.parent != FOLDER
    }
    return files | folders


def test_the_page_names_every_campaign_and_no_other() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = "\n".join(line for line in page.splitlines() if line.startswith("| "))
    listed = set(re.findall(r"python -m campaigns\.([\w.]+)", rows))
    assert listed == commands_in_folder()
    assert len(listed) > 8
