"""Draw scikit-learn's digits at 32 px: 0 to 4 into data/digits/train, 5 to 9 into data/digits/test."""

from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

digits = load_digits()
for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
    folder = Path("data/digits", "train" if digit < 5 else "test", str(digit))
    folder.mkdir(parents=True, exist_ok=True)
    drawn = Image.fromarray((pixels * 255 / 16).astype("uint8")).resize((32, 32), Image.Resampling.BICUBIC)
    drawn.save(folder / f"{number}.png")
