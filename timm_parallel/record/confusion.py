"""Draw a confusion matrix with Pillow.

Importing matplotlib would take as long as thirty steps of a small model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

# First and last color of matplotlib's color map Blues.
LOW, HIGH = (247, 251, 255), (8, 48, 107)
# Largest number of classes with names, and with counts in the cells. More are not readable.
MOST_NAMED, MOST_COUNTED = 40, 20
# Largest size of the matrix in pixels per side.
LARGEST = 1200
FONT = 12


def draw_confusion(counts: np.ndarray, classes: list[str]) -> np.ndarray:
    """Draw a confusion matrix as an RGB image, uint8 [height, width, 3].

    `counts`: number of images per [true class, predicted class]. The color of a cell shows its
    share of the images of the true class.
    """
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    cell = max(1, min(30, LARGEST // len(classes)))
    colors = np.array(LOW) + shares[:, :, None] * (np.array(HIGH) - np.array(LOW))
    matrix = colors.round().astype(np.uint8).repeat(cell, axis=0).repeat(cell, axis=1)
    font: Any = ImageFont.load_default(FONT)
    names = [_printable(name) for name in classes] if len(classes) <= MOST_NAMED else []
    margin = 2 * FONT + 8 + max((int(font.getlength(name)) for name in names), default=0)
    image = Image.new("RGB", (margin + matrix.shape[1] + 8, matrix.shape[0] + margin + 8), "white")
    image.paste(Image.fromarray(matrix), (margin, 8))
    draw = ImageDraw.Draw(image)
    vertical: Any = ImageFont.TransposedFont(font, Image.Transpose.ROTATE_90)
    for index, name in enumerate(names):
        middle = int((index + 0.5) * cell)
        draw.text((margin - 6, 8 + middle), name, "black", font, anchor="rm")
        draw.text((margin + middle - FONT // 2, 8 + matrix.shape[0] + 6), name, "black", vertical)
    if len(classes) <= MOST_COUNTED:
        for row, column in np.argwhere(counts):
            center = (margin + (column + 0.5) * cell, 8 + (row + 0.5) * cell)
            color = "white" if shares[row, column] > 0.5 else "black"
            draw.text(center, short(int(counts[row, column])), color, font, anchor="mm")
    draw.text(
        (margin + matrix.shape[1] / 2, image.height - 4), "predicted", "black", font, anchor="md"
    )
    draw.text((FONT // 2, 8 + matrix.shape[0] // 2 - 12), "true", "black", vertical)
    return np.asarray(image)


def short(count: int) -> str:
    """Format a count with at most four characters, rounded down, so that it fits in a cell: 9999,
    10k, 12M.
    """
    for unit in ("", "k", "M", "G", "T"):
        if count < (1000 if unit else 10_000):
            return f"{count}{unit}"
        count //= 1000
    return "…"


def _printable(name: str) -> str:
    """Escape unprintable characters of a class name, and shorten the name to 24 characters.

    Pillow raises an error for a rotated text with line breaks.
    """
    shown = (
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in name
    )
    text = "".join(shown)
    return text if len(text) <= 24 else text[:23] + "…"
