"""Training. Read run.py first: it shows one run, top to bottom."""
