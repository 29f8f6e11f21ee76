"""Write 1,003 images into four WebDataset shards: python make_shards.py s3://BUCKET"""

import sys
import tempfile
from pathlib import Path

import cv2
import numpy as np

import penstock as ps
from penstock.storage import Storage

with tempfile.TemporaryDirectory() as folder:
    with ps.ShardWriter(f"{folder}/digits-%03d.tar", maxcount=300) as writer:
        for number in range(1003):
            image = np.full((16, 16, 3), 25 * (number % 10), np.uint8)
            _, png = cv2.imencode(".png", image)
            sample = {"__key__": f"{number:06d}", "png": png.tobytes(), "cls": number % 10}
            writer.write(sample)
    for path in sorted(Path(folder).iterdir()):
        Storage().put(f"{sys.argv[1]}/{path.name}", path.read_bytes())
        print(f"{sys.argv[1]}/{path.name}")
