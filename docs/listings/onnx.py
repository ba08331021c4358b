"""From a photo to a class with the file of `scripts/export.py format=onnx`, for a square input_size
and crop_mode center, which most models have (interpolation: bilinear or bicubic).
"""

import json

import numpy
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession("<run folder>/export/model.onnx")
metadata = session.get_modelmeta().custom_metadata_map
metadata = {key: json.loads(text) for key, text in metadata.items()}
photo = ImageOps.exif_transpose(Image.open("rose.jpg")).convert("RGB")
_, height, width = metadata["input_size"]
size = [int(height / metadata["crop_pct"]) * side // min(photo.size) for side in photo.size]
photo = photo.resize(size, Image.Resampling[metadata["interpolation"].upper()])
left, top = round((size[0] - width) / 2), round((size[1] - height) / 2)
pixels = numpy.asarray(photo.crop((left, top, left + width, top + height))) / 255
images = ((pixels - metadata["mean"]) / metadata["std"]).transpose(2, 0, 1)[None].astype("float32")
scores = session.run(None, {"images": images})[0]  # [batch, classes]; the batch size is free
print(metadata["class_names"][scores[0].argmax()])
