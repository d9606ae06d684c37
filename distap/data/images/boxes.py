"""Parts of images: boxes, their shapes, and how far a decoder may scale them down."""

Box = tuple[int, int, int, int]  # left, top, right, bottom; pixels
Shape = tuple[int, int]  # height and width, pixels
FACTORS = (8, 4, 2, 1)  # by which libjpeg can scale down while it decodes


def central_box(width: int, height: int) -> Box:
    """Return the largest square in the middle of an image."""
    side = min(width, height)
    left = (width - side) // 2
    top = (height - side) // 2
    return left, top, left + side, top + side


def reduction(box: Box, shape: Shape) -> int:
    """Return the greatest factor by which libjpeg may shrink a box that must stay as large as
    `shape`, or 1.
    """
    height, width = shape
    across = box[2] - box[0]
    down = box[3] - box[1]
    return next(
        (factor for factor in FACTORS if across >= factor * width and down >= factor * height), 1
    )
