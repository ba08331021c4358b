"""A confusion matrix as an image. Drawn by Pillow: matplotlib took as long as thirty steps of a small model, in every run."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

LOW, HIGH = (247, 251, 255), (8, 48, 107)  # the ends of matplotlib's Blues
MOST_NAMED, MOST_COUNTED = 40, 20  # classes; more names or counts cannot be read
LARGEST = 1200  # pixels of a side
FONT = 12


def draw_confusion(counts: np.ndarray, classes: list[str]) -> np.ndarray:
    """[true, predicted] counts as an RGB image, uint8 [height, width, 3], shaded by the share of each true class."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    cell = max(1, min(30, LARGEST // len(classes)))
    colours = np.array(LOW) + shares[:, :, None] * (np.array(HIGH) - np.array(LOW))
    matrix = np.repeat(np.repeat(colours.round().astype(np.uint8), cell, 0), cell, 1)
    font: Any = ImageFont.load_default(FONT)
    names = [_printable(name) for name in classes] if len(classes) <= MOST_NAMED else []
    margin = 2 * FONT + 8 + max((int(font.getlength(name)) for name in names), default=0)
    image = Image.new("RGB", (margin + matrix.shape[1] + 8, matrix.shape[0] + margin + 8), "white")
    image.paste(Image.fromarray(matrix), (margin, 8))
    draw = ImageDraw.Draw(image)
    upwards: Any = ImageFont.TransposedFont(font, Image.Transpose.ROTATE_90)
    for place, name in enumerate(names):
        middle = int((place + 0.5) * cell)
        draw.text((margin - 6, 8 + middle), name, "black", font, anchor="rm")
        draw.text((margin + middle - FONT // 2, 8 + matrix.shape[0] + 6), name, "black", upwards)
    if len(classes) <= MOST_COUNTED:
        for row, column in np.argwhere(counts):
            centre = (margin + (column + 0.5) * cell, 8 + (row + 0.5) * cell)
            colour = "white" if shares[row, column] > 0.5 else "black"
            draw.text(centre, str(int(counts[row, column])), colour, font, anchor="mm")
    draw.text((margin + matrix.shape[1] / 2, image.height - 4), "predicted", "black", font, anchor="md")
    draw.text((FONT // 2, 8 + matrix.shape[0] // 2 - 12), "true", "black", upwards)
    return np.asarray(image)


def _printable(name: str) -> str:
    """A folder's name may be no UTF-8, or long."""
    text = name.encode(errors="replace").decode()
    return text if len(text) <= 24 else text[:23] + "…"
