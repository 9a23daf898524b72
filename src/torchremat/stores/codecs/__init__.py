"""Codecs: how a tensor is held in fewer bytes.

Lossless ones, which `Compressed` applies to whatever they fit: `MaskBits`, `TwoValues`, `NarrowIndices`.
Lossy ones, each with a declared bound, which it applies only if told to: `BFloat16`, `Float8`, `Int8`.
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
