"""Parts of images: boxes, their shapes, and how far a decoder may scale them down."""

Box = tuple[int, int, int, int]  # left, top, right, bottom; pixels
Shape = tuple[int, int]  # height and width, pixels
FACTORS = (8, 4, 2, 1)  # by which libjpeg can scale down while it decodes


def clipped(box: Box, width: int, height: int) -> Box | None:
    """Return the part of a box that lies within an image of this size; None if nothing does."""
    left, top, right, bottom = box
    left = max(left, 0)
    top = max(top, 0)
    right = min(right, width)
    bottom = min(bottom, height)
    return (left, top, right, bottom) if left < right and top < bottom else None


def central_square(box: Box) -> Box:
    """Return the largest square in the middle of a box."""
    left, top, right, bottom = box
    side = min(right - left, bottom - top)
    left += (right - left - side) // 2
    top += (bottom - top - side) // 2
    return left, top, left + side, top + side


def reduction(box: Box, shape: Shape) -> int:
    """Return the greatest factor by which libjpeg may shrink a box that `shape` still fits into."""
    left, top, right, bottom = box
    height, width = shape
    for factor in FACTORS:
        if right - left >= factor * width and bottom - top >= factor * height:
            return factor
    return 1
