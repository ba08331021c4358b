"""Train a timm model: `python train.py [key=value …]`, or start the same command with torchrun.
`python train.py --help` explains more.

src/app.py connects this project to the library. src/train/build.py builds a run, and
src/train/run.py contains its loop.
"""

from src.app import app
from timm_parallel import main

if __name__ == "__main__":
    main(app)
