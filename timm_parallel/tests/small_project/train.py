"""Entry script of a small project that finds a bright spot in tiny images. Tests use this project
to check that the library works without this template.
"""

from small.app import app

from timm_parallel import main

if __name__ == "__main__":
    main(app)
