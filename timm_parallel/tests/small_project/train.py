"""Fit a line: a project that is not this template, for tests of the library."""

from small.app import app

from timm_parallel.entry import main

if __name__ == "__main__":
    main(app)
