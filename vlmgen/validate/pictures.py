"""Real pictures and a moving view of one, from what scikit-image and scikit-learn ship."""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image

SOURCES = {
    "skimage": ("astronaut", "coffee", "chelsea", "rocket", "camera", "coins"),
    "sklearn": ("china", "flower"),
}
"""Library -> pictures that lie in its wheel, so that nothing is downloaded."""


@cache
def photograph(name: str) -> np.ndarray:
    """One picture in full size, uint8 `[height, width, 3]`."""
    if name in SOURCES["sklearn"]:
        from sklearn.datasets import load_sample_image

        return np.asarray(load_sample_image(f"{name}.jpg"))
    import skimage.data

    pixels = np.asarray(getattr(skimage.data, name)())
    return np.repeat(pixels[..., None], 3, axis=-1) if pixels.ndim == 2 else pixels


def picture(name: str, height: int, width: int) -> np.ndarray:
    """A picture scaled to a size, uint8 `[height, width, 3]`."""
    scaled = Image.fromarray(photograph(name)).resize((width, height), Image.Resampling.BICUBIC)
    return np.array(scaled)


def moving_view(name: str, frames: int, height: int, width: int) -> np.ndarray:
    """A camera that moves over a picture: uint8 `[frames, height, width, 3]`."""
    whole = picture(name, 2 * height, 2 * width)
    path = np.linspace(0.0, 1.0, frames)
    views = [
        whole[int(t * height) : int(t * height) + height, int(t**2 * width) :][:, :width]
        for t in path
    ]
    return np.stack(views)
