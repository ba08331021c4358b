"""Tests of the project. A package, so that forked ranks find helpers by `tests.<module>`."""
