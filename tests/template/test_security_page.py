"""docs/security.md names the tests of each threat."""

from __future__ import annotations

import re

from timm_parallel.testing.commands import ROOT, TEST_FILES


def test_every_threat_in_docs_security_md_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    tests = {
        name for path in TEST_FILES for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| who")
    ]
    assert len(rows) >= 5
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named and set(named) <= tests, row


def test_no_documented_command_opens_tensorboard_to_other_machines() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert "tensorboard --logdir" in texts
    assert not re.search(r"--bind_all|--host[ =]", texts.replace("`--bind_all`", ""))
