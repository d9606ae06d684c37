"""Distances between the places of images, on a plane or on the globe."""

import numpy as np
from numpy.typing import NDArray

EARTH_METRES = 6_371_008.8  # mean radius


def metres_on_plane(points: NDArray[np.float64], point: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the (N,) metres between points (N, 2), east and north, and one of them."""
    return np.linalg.norm(points - point, axis=1)


def metres_on_globe(points: NDArray[np.float64], point: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the (N,) metres of ground between points (N, 2), latitude and longitude in degrees,
    and one of them.

    The way is along the great circle of a sphere, by the haversine formula, which is exact for near
    points too.
    """
    half = np.sin(np.radians(points - point) / 2) ** 2
    parallels = np.cos(np.radians(points[:, 0])) * np.cos(np.radians(point[0]))
    haversine = np.clip(half[:, 0] + parallels * half[:, 1], 0, 1)
    return 2 * EARTH_METRES * np.arctan2(np.sqrt(haversine), np.sqrt(1 - haversine))
