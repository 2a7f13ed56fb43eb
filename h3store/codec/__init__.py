"""The chunk codec: specs, element types, encode and decode of single chunks, and the choice of a spec by trial."""

from __future__ import annotations

from h3store._ffi import CHUNK_DTYPE
from h3store.codec.chunk import Codec, check_holds, decode_chunk, encode_chunk
from h3store.codec.spec import (
    DTYPES,
    MAX_BASE_DEPTH,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    CheckKind,
    Delta,
    DtypeInfo,
    Filter,
    Spec,
    default_spec,
    dtype_info,
    raw_spec,
)
from h3store.codec.trial import choose_spec

__all__ = ["CHUNK_DTYPE", "DTYPES", "MAX_BASE_DEPTH", "MAX_CHUNK_BYTES", "MIN_CHUNK_BYTES", "CheckKind", "Codec",
           "Delta", "DtypeInfo", "Filter", "Spec", "check_holds", "choose_spec", "decode_chunk", "default_spec",
           "dtype_info", "encode_chunk", "raw_spec"]
