"""HTML pages with images, each of which is one file."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image

from timm_parallel.machine.files import write_text


def jpeg_base64(picture: Image.Image) -> str:
    """Encode an RGB image as text for an HTML page."""
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG")
    return base64.b64encode(jpeg.getvalue()).decode()


def write_images(
    title: str, sections: Mapping[str, Sequence[tuple[Image.Image, list[str]]]], page: Path
) -> None:
    """Write images as one HTML file. `sections`: heading -> images, each with its lines of text."""
    render_page("image_page.html.j2", page, title=title, sections=sections, jpeg=jpeg_base64)


def render_page(template: str, page: Path, **values: Any) -> None:
    """Write an HTML file from a template in the folder of this file."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    text = environment.get_template(template).render(**values)
    # Escape bytes of file names that are not UTF-8, because an HTML page cannot have them.
    write_text(page, text.encode(errors="backslashreplace").decode())
