"""docs/from_lightning.md names the same keys as the error messages of train.py for options of
Lightning.
"""

from __future__ import annotations

import re

from tests.template.library.test_typical_mistakes import KEYS, ROOT, suggestions_for


def test_from_lightning_page_lists_the_keys_that_error_messages_suggest() -> None:
    page = (ROOT / "docs" / "from_lightning.md").read_text(encoding="utf-8")
    table = page.split("| there, on the command line | here |")[1].split("\n\n")[0]
    rows = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in table.splitlines()[2:]]
    assert len(rows) > 30
    wrong = []
    for there, here in rows:
        allowed = re.findall(r"`([^`]+)`", here)
        for word in re.findall(r"`([^`]+)`", there):
            key = word.partition("=")[0]
            if key in KEYS:
                continue
            found, has_none = suggestions_for(word)
            is_named = bool(found) and any(
                name == found[0] or name.startswith(f"{found[0]}=") for name in allowed
            )
            if not (is_named or (has_none and here.startswith("no key"))):
                wrong.append((word, found))
    assert wrong == []
