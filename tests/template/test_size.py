"""Size of the code in statements."""

from scripts.maintain.size import count_statements


def test_count_statements_counts_nested_statements_but_no_docstrings() -> None:
    source = (
        '"""Module."""\nimport os\n\ndef f():\n    """Function."""\n    if os:\n        return 1\n'
    )
    assert count_statements(source) == 4
