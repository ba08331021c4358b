"""Train a timm model: `python train.py [key=value …]`, or start the same command with torchrun.
`python train.py --help` explains more.

src/app.py connects this project to the library. src/train/run.py contains the training run.
"""

from src.app import app
from timm_parallel import main

if __name__ == "__main__":
    main(app)
