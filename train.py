"""Train a timm model: `python train.py [key=value …]`, or the same under torchrun. See --help.

src/app.py says what the library needs to know of this project; src/train/run.py trains.
"""

from src.app import app
from timm_parallel import main

if __name__ == "__main__":
    main(app)
