"""Codecs: how a tensor is held in fewer bytes.

codec.py     the interface of a codec
lossless.py  codecs that lose nothing
lossy.py     codecs that lose digits

Lossless codecs, which `Compressed` applies wherever they fit: `MaskBits`, `TwoValues`, `NarrowIndices`.
Lossy codecs, each with a declared bound, which it applies only on request: `BFloat16`, `Float8`, `Int8`.
"""

from torchremat.stores.codecs.codec import Codec, Encoded, Form, LossyCodec
from torchremat.stores.codecs.lossless import MaskBits, NarrowIndices, TwoValues
from torchremat.stores.codecs.lossy import BFloat16, Float8, Int8

__all__ = [
    "BFloat16",
    "Codec",
    "Encoded",
    "Float8",
    "Form",
    "Int8",
    "LossyCodec",
    "MaskBits",
    "NarrowIndices",
    "TwoValues",
]
