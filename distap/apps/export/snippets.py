"""The code that a model card shows; the tests run it as it stands there."""

PIXELS = '''
import torch
from PIL import Image, ImageOps
from torchvision.transforms.v2 import functional as F


def pixels(path, size=%d):
    """(1, 3, size, size) uint8."""
    image = F.pil_to_tensor(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))
    side = min(image.shape[1:])
    top, left = (image.shape[1] - side) // 2, (image.shape[2] - side) // 2
    return F.resize(image[:, top : top + side, left : left + side], [size, size], antialias=True)[None]


images = pixels("photo.jpg")
'''
PROGRAM = """
program = torch.export.load("model.pt2").module()
with torch.inference_mode():
    descriptors = program(images)
"""
ONNX = """
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
(descriptors_by_onnx,) = session.run(["descriptors"], {"images": images.numpy()})
"""
TIMM = """
import timm

backbone = timm.create_model("{name}", {arguments}, checkpoint_path="backbone.safetensors").eval()
mean, std = torch.tensor({mean}).view(3, 1, 1), torch.tensor({std}).view(3, 1, 1)
with torch.inference_mode():
    features = backbone((images / 255 - mean) / std)
"""
