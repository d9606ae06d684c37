import io
import struct
import zlib

import numpy as np
import pytest
import simplejpeg
import torch
from costly_images import arithmetic_jpeg
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps
from raising import raises

from benchmarks.photos import jpeg, photo
from distap.data.images import decoding
from distap.data.images.boxes import reduction
from distap.data.images.damage import DamagedImageError, NoReaderError
from distap.data.images.decoding import EncodedImage, image_size
from distap.data.images.formats import readable_formats
from distap.data.loading.share import failure

PHOTO = photo(301, 203, seed=0)
ORIENTATION = 0x0112


def encoded(image, file_format, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def decode(data: bytes, **limits) -> Image.Image:
    return EncodedImage(data, **limits).whole()


def pixels(image) -> np.ndarray:
    return np.asarray(image).astype(int)


def reason(data: bytes, **limits) -> str:
    with pytest.raises(DamagedImageError) as error:
        decode(data, **limits)
    return error.value.reason


# Scaled decoding


def test_the_reduction_never_makes_a_crop_smaller_than_the_result():
    assert [
        reduction((0, 0, side, 900), (100, 100))
        for side in (99, 100, 199, 200, 399, 400, 799, 800, 5000)
    ] == [*(1, 1, 1, 2, 2, 4, 4, 8, 8)]
    assert reduction((50, 0, 950, 250), (100, 100)) == 2


def test_a_scaled_crop_decodes_no_more_of_a_jpeg_than_it_needs(monkeypatch):
    shapes = []
    decode_jpeg = simplejpeg.decode_jpeg

    def noted(*arguments, **settings):
        decoded = decode_jpeg(*arguments, **settings)
        shapes.append(decoded.shape)
        return decoded

    monkeypatch.setattr(simplejpeg, "decode_jpeg", noted)
    image = EncodedImage(jpeg(PHOTO, 90))
    for size in (50, 51, 102):
        image.crop((0, 0, 201, 203), (size, size))
    assert shapes == [(51, 76, 3), (102, 151, 3), (203, 301, 3)]


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 1}]
)
def test_pixels_of_a_jpeg_are_those_of_pillow_at_every_scale(mode, options):
    for width, height in ((301, 203), (64, 8), (17, 33)):
        data = encoded(PHOTO.resize((width, height)).convert(mode), "JPEG", **options)
        for factor in (8, 4, 2, 1):
            image = Image.open(io.BytesIO(data))
            image.draft(None, (width // factor, height // factor))
            if width // factor and height // factor:
                box = (0, 0, width // factor * factor, height // factor * factor)
                expected = pixels(image.convert("RGB"))[: height // factor, : width // factor]
                actual = EncodedImage(data)._decoded(box, (height // factor, width // factor))
                np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("side", [32, 96])  # decoded at a fourth of its size, and in full
@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_are_upright_whatever_the_orientation(orientation, side):
    stored = PHOTO.crop((0, 0, 296, 200))  # multiples of eight, whose blocks begin at either end
    data = encoded(stored, "JPEG", quality=95, exif=turned(orientation))
    image = EncodedImage(data)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert image.size == upright.size
    assert np.array_equal(pixels(image.whole()), pixels(upright))
    box = (16, 8, 112, 152)
    reference = EncodedImage(encoded(upright, "PNG")).crop(box, (side, side)).int()
    difference = (image.crop(box, (side, side)).int() - reference).abs().float()
    assert difference.mean() < (2 if side == 32 else 0.2)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
def test_pillow_scales_a_whole_image_as_torch_does(orientation, file_format):
    image = EncodedImage(encoded(PHOTO, file_format, exif=turned(orientation)))
    width, height = (side // 3 for side in image.size)
    actual = pixels(image.scaled((height, width))).astype(int)
    expected = image.crop((0, 0, *image.size), (height, width)).permute(1, 2, 0).numpy()
    assert np.abs(actual - expected).max() <= 1


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "TIFF", "AVIF", "HEIF"])
def test_other_formats_are_turned_upright_as_well(file_format):
    if file_format not in readable_formats():
        pytest.skip("no reader")
    options = {"lossless": True} if file_format == "WEBP" else {}
    image = EncodedImage(encoded(PHOTO, file_format, exif=turned(6).tobytes(), **options))
    assert image.size == (203, 301)
    difference = np.abs(pixels(image.whole()) - pixels(PHOTO.transpose(Image.Transpose.ROTATE_270)))
    assert difference.mean() <= (6 if file_format in ("AVIF", "HEIF") else 0)


def test_a_missing_reader_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(decoding, "missing_reader", lambda form: "pip install 'distap[formats]'")
    with pytest.raises(
        NoReaderError, match=r"HEIF, for which there is no reader: pip install 'distap\[formats\]'"
    ):
        decode(b"\0\0\0\x18ftypheic" + bytes(100))
    with raises("package.missing", "shard:key", "distap[formats"):
        failure("shard:key", NoReaderError("decode_error", "pip install 'distap[formats]'"))


def test_broken_exif_leaves_the_image_as_it_is_stored():
    assert EncodedImage(encoded(PHOTO, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")).size == (
        301,
        203,
    )
    assert EncodedImage(encoded(PHOTO, "JPEG", exif=turned(77))).size == (301, 203)


# Modes


def test_sixteen_bits_are_divided_and_not_clipped():
    values = np.array([[0, 128, 129, 257, 30000, 65535]], dtype=np.uint16)
    for file_format in ("PNG", "TIFF"):
        image = decode(encoded(Image.fromarray(values), file_format))
        assert pixels(image)[0, :, 0].tolist() == [0, 0, 1, 1, 117, 255]


@pytest.mark.parametrize("mode", ["LA", "RGBA", "PA"])
@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "GIF", "TIFF"])
def test_what_is_transparent_is_white(mode, file_format):
    if (mode == "PA" and file_format != "TIFF") or (mode == "LA" and file_format == "GIF"):
        pytest.skip("Pillow does not write it")
    image = Image.new("RGBA", (8, 8), (10, 200, 30, 0))
    image.paste((0, 0, 0, 255), (0, 0, 4, 8))
    options = {"lossless": True} if file_format == "WEBP" else {}
    decoded = pixels(decode(encoded(image.convert(mode), file_format, **options)))
    assert (decoded[:, :4] == 0).all()
    assert (decoded[:, 4:] == 255).all()


def test_grey_palette_and_single_bit_images_keep_their_colours():
    for mode in ("L", "1"):
        image = PHOTO.convert(mode)
        assert np.array_equal(pixels(decode(encoded(image, "PNG"))), pixels(image.convert("RGB")))
    image = PHOTO.quantize(32)
    for file_format in ("PNG", "GIF", "BMP", "TIFF"):
        assert np.array_equal(
            pixels(decode(encoded(image, file_format))), pixels(image.convert("RGB"))
        )


@pytest.mark.parametrize("side", [16, 64])
def test_cmyk_jpeg_is_not_shown_as_its_negative(side):
    data = encoded(Image.new("CMYK", (64, 64), (255, 0, 0, 0)), "JPEG", quality=95)
    cyan = EncodedImage(data).crop((0, 0, 64, 64), (side, side))
    assert (cyan.flatten(1).float().mean(1) - torch.tensor([0.0, 255.0, 255.0])).abs().max() < 3


@pytest.mark.parametrize("side", [16, 64])
def test_ycck_jpeg_is_converted_by_adobes_convention(side):
    # Luma 200 and neutral chroma, as inks are stored: inverted, so that each ink is 200 and black
    # none.
    data = bytearray(encoded(Image.new("CMYK", (64, 64), (55, 127, 127, 0)), "JPEG", quality=95))
    data[data.index(b"Adobe") + 11] = 2  # the marker's transform: from CMYK to YCCK
    grey = EncodedImage(bytes(data)).crop((0, 0, 64, 64), (side, side))
    assert (grey.int() - 55).abs().max() <= 3


def test_of_several_pictures_in_a_jpeg_the_first_counts():
    data = encoded(
        PHOTO, "MPO", save_all=True, append_images=[Image.new("RGB", (9, 9))], quality=90
    )
    assert torch.equal(
        EncodedImage(data).crop((0, 0, 301, 203), (50, 50)),
        EncodedImage(jpeg(PHOTO, 90)).crop((0, 0, 301, 203), (50, 50)),
    )


def test_of_an_animation_the_first_frame_counts():
    frames = [Image.new("RGB", (9, 9), colour) for colour in ("red", "lime")]
    for file_format in ("GIF", "WEBP", "PNG", "TIFF"):
        data = encoded(frames[0], file_format, save_all=True, append_images=frames[1:])
        assert pixels(decode(data))[4, 4].tolist() == pytest.approx([255, 0, 0], abs=3)


def test_floats_are_refused_since_their_white_is_unknown():
    assert reason(encoded(Image.new("F", (4, 4)), "TIFF")) == "decode_error"


# Limits


@pytest.mark.parametrize("file_format", readable_formats())
def test_too_many_pixels_are_refused_from_the_header(file_format, monkeypatch):
    data = encoded(Image.new("RGB", (50, 40)), file_format)
    assert image_size(data, max_pixels=2000) == (50, 40)
    decode(data, max_pixels=2000)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("decoded"))
    assert reason(data, max_pixels=1999) == "too_large"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """A grey PNG with no pixels but these chunks."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            header,
            *chunks,
            chunk(b"IDAT", zlib.compress(bytes(2))),
            chunk(b"IEND", b""),
        )
    )


def test_bombs_are_refused():
    assert reason(png(50_000, 50_000)) == "too_large"
    assert reason(png(70_000, 1)) == "too_large"
    bomb = zlib.compress(bytes(10**7))
    assert reason(png(1, 1, chunk(b"zTXt", b"Raw profile type exif\0\0" + bomb))) == "decode_error"
    assert pixels(decode(png(1, 1))).shape == (1, 1, 3)


def test_a_huge_canvas_of_webp_is_refused_before_room_is_made_for_it(monkeypatch):
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
    data = (
        b"RIFF"
        + struct.pack("<I", 22)
        + b"WEBPVP8X"
        + struct.pack("<II", 10, 0)
        + b"\xff\xff\xff\x00\x10\x00"
    )
    assert reason(data) == "too_large"


def test_a_small_tiff_of_one_huge_tile_is_refused():
    tile = zlib.compress(bytes(1000))
    tags = {
        256: 16,
        257: 16,
        258: 8,
        259: 8,
        262: 1,
        277: 1,
        322: 30_000,
        323: 30_000,
        324: 8,
        325: len(tile),
    }
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    data = (
        struct.pack("<2sHI", b"II", 42, 8 + len(tile))
        + tile
        + struct.pack("<H", len(tags))
        + entries
        + bytes(4)
    )
    assert image_size(encoded(Image.new("L", (16, 16)), "TIFF")) == (16, 16)
    assert reason(data) == "too_large"


def test_an_arithmetic_jpeg_of_countless_scans_is_refused_before_it_is_decoded():
    assert decode(arithmetic_jpeg(64, 48, scans=3)).size == (64, 48)
    bomb = arithmetic_jpeg(4000, 4000, scans=3600)
    assert len(bomb) < 37_000
    assert reason(bomb) == "too_large"
    with pytest.raises(DamagedImageError, match="3600 scans of 4000 x 4000 pixels"):
        image_size(bomb)
    assert reason(arithmetic_jpeg(10_000, 9_000, scans=18)) == "too_large"


def test_a_larger_limit_than_pillows_own_is_obeyed(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert decode(encoded(Image.new("RGB", (50, 40)), "PNG"), max_pixels=2000).size == (50, 40)


@pytest.mark.parametrize("file_format", ["EPS", "PPM", "TGA", "ICO", "PDF"])
def test_other_formats_stay_shut(file_format):
    with pytest.raises(DamagedImageError, match="not an image of JPEG, PNG"):
        decode(encoded(PHOTO, file_format))


# Sound files that decoders stumble over


@pytest.mark.parametrize(
    "extra",
    [
        chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(2_000_000))),
        chunk(b"zTXt", b"c\0\0" + zlib.compress(b"a" * 2_000_000)),
        chunk(b"iTXt", b"XMP\0\1\0\0\0" + zlib.compress(b"a" * 2_000_000)),
        chunk(b"tEXt", b"k\0" + b"a" * 2_000_000),
    ],
)
@pytest.mark.parametrize("place", [33, -12])
def test_comments_and_profiles_of_a_png_change_no_pixel(extra, place):
    data = encoded(PHOTO, "PNG", exif=turned(6))
    changed = data[:place] + extra + data[place:]
    assert image_size(changed) == PHOTO.size
    assert np.array_equal(pixels(decode(changed)), pixels(decode(data)))


@pytest.mark.parametrize("kind", [b"IDAT", b"tRNS"])
def test_a_wrong_crc_of_pixels_is_damage(kind):
    data = encoded(PHOTO.quantize(8), "PNG", transparency=3)
    place = data.index(kind) + 4
    assert reason(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]) == "decode_error"


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_a_jpeg_may_lack_its_end_marker_but_nothing_of_its_image(options):
    data = encoded(PHOTO, "JPEG", **options)
    for end in (1, 2):
        assert np.array_equal(pixels(decode(data[:-end])), pixels(decode(data)))
    assert {reason(data[:-end]) for end in (12, 40, 400)} == {"truncated"}


@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
def test_line_ends_may_stand_before_an_image(file_format):
    data = encoded(PHOTO, file_format)
    assert np.array_equal(pixels(decode(b"\r\n" + data)), pixels(decode(data)))
    assert image_size(b"\n" + data) == PHOTO.size


# Damage


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "BMP", "GIF"])
def test_a_cut_image_is_called_truncated(file_format):
    data = encoded(PHOTO, file_format)
    assert {reason(data[: len(data) * eighths // 8]) for eighths in range(1, 8)} == {"truncated"}


def test_memory_that_does_not_suffice_is_no_damage(monkeypatch):
    monkeypatch.setattr(decoding, "_rgb", lambda image: [image] * 2**60)
    with pytest.raises(
        MemoryError, match=r"^a\.tar:b: decoding its 301 x 203 pixels ran out of memory"
    ):
        decode(encoded(PHOTO, "PNG"), name="a.tar:b")


SMALL = photo(60, 44, seed=1)
FILES = [
    encoded(SMALL, "JPEG", exif=turned(6)),
    encoded(SMALL, "JPEG", progressive=True, subsampling=0),
    encoded(SMALL.convert("CMYK"), "JPEG"),
    encoded(SMALL, "PNG", exif=turned(3)),
    encoded(SMALL.quantize(16), "PNG", transparency=0),
    encoded(SMALL, "WEBP"),
    encoded(SMALL.convert("RGBA"), "WEBP", lossless=True),
    encoded(SMALL, "BMP"),
    encoded(SMALL, "GIF", save_all=True, append_images=[SMALL.rotate(9)]),
    encoded(SMALL, "TIFF"),
    encoded(SMALL, "TIFF", compression="tiff_lzw"),
    encoded(SMALL, "TIFF", compression="tiff_adobe_deflate"),
    encoded(SMALL, "TIFF", compression="jpeg"),
]
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 2**20),
        st.sampled_from([0, 1, 4, 30]),
        st.one_of(
            st.binary(max_size=4),
            st.sampled_from([b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", bytes(4)]),
        ),
    ),
    max_size=4,
)


@given(st.sampled_from(FILES), st.booleans(), CHANGES, st.one_of(st.none(), st.integers(0, 4000)))
def test_whatever_the_bytes_there_is_an_image_within_limits_or_damage(data, at_start, changes, cut):
    for position, removed, inserted in changes:
        position %= min(len(data), 100) if at_start else len(data)
        data = data[:position] + inserted + data[position + removed :] or b"\0"
    limit = 100_000
    try:
        image = EncodedImage(data[:cut], limit)
        assert 1 <= image.size[0] * image.size[1] <= limit
        assert image.crop((0, 0, *image.size), (8, 8)).shape == (3, 8, 8)
        assert torch.equal(
            image.crop((0, 0, *image.size), (8, 8)), image.crop((0, 0, *image.size), (8, 8))
        )
        assert image.whole().size == image.size
    except DamagedImageError as error:
        assert error.reason in ("decode_error", "truncated", "too_large")
