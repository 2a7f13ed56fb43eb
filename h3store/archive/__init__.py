"""The archive file: FORMAT.md says what is in it, Reader and Writer open it, verify and describe look at all of it."""

from __future__ import annotations

from h3store.archive.bases import check_bases, refuse_circle
from h3store.archive.compact import compacted
from h3store.archive.contents import Contents
from h3store.archive.reader import Reader, checked_path, is_archive
from h3store.archive.records import ACCESS_CHUNK_BYTES, DEFAULT_CHUNK_BYTES, BaseRef, TensorRecord
from h3store.archive.rollback import rollback
from h3store.archive.verify import ArchiveInfo, BadChunk, TensorInfo, VerifyReport, describe, verify
from h3store.archive.writer import Writer
from h3store.codec import CHUNK_DTYPE

__all__ = ["ACCESS_CHUNK_BYTES", "CHUNK_DTYPE", "DEFAULT_CHUNK_BYTES", "ArchiveInfo", "BadChunk", "BaseRef", "Contents",
           "Reader", "TensorInfo", "TensorRecord", "VerifyReport", "Writer", "check_bases", "checked_path", "compacted",
           "describe", "is_archive", "refuse_circle", "rollback", "verify"]
