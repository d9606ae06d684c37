"""Convert crop boxes to the orientation that a file stores, and choose the scale for libjpeg to decode at."""

FACTORS = (8, 4, 2, 1)  # by which libjpeg can scale down while it decodes

Box = tuple[int, int, int, int]  # left, top, right, bottom; pixels
Shape = tuple[int, int]  # height and width, pixels
Turns = tuple[bool, bool, bool]  # whether EXIF mirrors the stored image left to right, top to bottom, transposes it


def central_box(width: int, height: int) -> Box:
    """Return the largest square in the middle of an image."""
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def reduction(box: Box, shape: Shape) -> int:
    """Return the greatest factor by which libjpeg may shrink a box that must stay as large as `shape`, or 1."""
    height, width = shape
    across, down = box[2] - box[0], box[3] - box[1]
    return next((factor for factor in FACTORS if across >= factor * width and down >= factor * height), 1)


def stored_box(box: Box, size: tuple[int, int], turns: Turns) -> Box:
    """Convert a box of the upright image to a box of the stored one, whose width and height is `size`."""
    across, down, transposed = turns
    width, height = size
    left, top, right, bottom = (box[1], box[0], box[3], box[2]) if transposed else box
    if across:
        left, right = width - right, width - left
    if down:
        top, bottom = height - bottom, height - top
    return left, top, right, bottom
