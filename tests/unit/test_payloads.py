"""What pushes are made of, read by SGLang's own unpickler, which knows few names."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import torch

from slime.weights.payload import by_value, flat_layout, serialize
from slime.weights.tensor import SharedBuffer

NUM_GPUS = 0

READ = """
import json, sys
from slime.backends.sglang import patches
patches.install()
from sglang.srt.utils.common import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata
read = []
for line in sys.stdin:
    bucket = MultiprocessingSerializer.deserialize(line.strip())
    assert all(type(place) is FlattenedTensorMetadata for place in bucket["metadata"])
    tensors = FlattenedTensorBucket(**bucket).reconstruct_tensors()
    read.append([[name, str(tensor.dtype), tensor.tolist()] for name, tensor in tensors])
print(json.dumps(read))
"""


def test_engines_read_what_is_pushed() -> None:
    bucket = [("a", torch.randn(3, 5)), ("b", torch.randn(7).bfloat16()), ("c", torch.arange(4))]
    layout, size = flat_layout(bucket)
    shared, own = SharedBuffer(size), torch.empty(size, dtype=torch.uint8)
    for flat in (shared.tensor, own):
        for place, (_, tensor) in zip(layout, bucket, strict=True):
            flat[place.start_idx : place.end_idx].copy_(tensor.reshape(-1).view(torch.uint8))
    lines = [
        serialize({"flattened_tensor": shared.tensor, "metadata": layout}, shared.reduce),
        serialize({"flattened_tensor": own, "metadata": layout}, by_value),
    ]
    assert b"slime.weights" not in base64.b64decode(lines[1]), "a server of another's reads it, too"
    ran = subprocess.run(
        [sys.executable, "-c", READ], input="\n".join(lines), capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    want = [[name, str(tensor.dtype), tensor.tolist()] for name, tensor in bucket]
    assert json.loads(ran.stdout.splitlines()[-1]) == [want, want]
