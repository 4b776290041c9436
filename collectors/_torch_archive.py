"""What `torch.save` wrote, read without torch and without running anything of it.

Such a file is a zip archive that is not compressed: `NAME/data.pkl`, a pickle of plain containers whose tensors refer to
`NAME/data/KEY`, the bytes of their storages, in the order that `NAME/byteorder` says. The pickle is looked through
before it is read: only operations that build plain data are let pass, with positions and lengths that its size
allows. Of names it may only use those in `STORAGES`, `collections.OrderedDict` and `torch._utils._rebuild_tensor_v2`,
which here is a function of ours that notes shape and strides. Numbers of a tensor are read when they are asked for.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

#: First bytes of a zip archive, and of what torch wrote before 1.6: a pickled magic number.
ZIP, LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
#: The pickle holds names and shapes: beyond this it holds what was recorded for each token. An operation makes
#: an object of some 60 bytes.
MOST_PICKLED, MOST_OPERATIONS = 256 << 20, 20_000_000
MOST_DIMENSIONS = 8
#: Storage classes, and NumPy's type of their elements; without one they may be there, but not be read.
STORAGES = {
    "DoubleStorage": "f8",
    "FloatStorage": "f4",
    "HalfStorage": "f2",
    "BFloat16Storage": None,
    "LongStorage": "i8",
    "IntStorage": "i4",
    "ShortStorage": "i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
}
#: Operations that build plain data.
_PLAIN = frozenset(
    (
        "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE",
        "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_DICT",
        "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS",
        "GLOBAL", "STACK_GLOBAL", "BINPERSID", "REDUCE",
    )
)  # fmt: skip
_KEY = re.compile(r"[\w.-]{1,64}")
_UNPRINTABLE = re.compile(r"[^\w.]")
#: What reading a pickle that was made by hand may end in.
_WRONG = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError,
)  # fmt: skip


class Refused(Exception):
    """The archive, or a tensor of it, cannot be used: one sentence without a full stop."""


@dataclass(frozen=True)
class _Storage:
    key: str
    kind: str
    elements: int


@dataclass(frozen=True)
class Tensor:
    """Where in a storage the elements of a tensor lie. `TorchArchive.array` reads them."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class TorchArchive:
    """An open archive. `root` is the object that was saved, with a `Tensor` for each tensor.

    Raises Refused where it is none, is damaged, or names what only code could build.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._size = file.seek(0, io.SEEK_END)
        try:
            self._zip = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
            raise Refused(
                "the archive cannot be opened: it ends early or is damaged (its directory is at its end)"
            ) from error
        pickles = [name for name in self._zip.namelist() if re.fullmatch(r"[^/]+/data\.pkl", name)]
        if len(pickles) != 1:
            raise Refused("a zip archive, but none of torch.save: it has no NAME/data.pkl, or several")
        self._name = pickles[0].removesuffix("/data.pkl")
        self._order = self._byte_order()
        content = self._read(pickles[0], MOST_PICKLED)
        _look_through(content)
        self.root = _load(content)

    def array(self, tensor: Tensor) -> NDArray[Any]:
        """The elements of a tensor, as an array that cannot be written to.

        Raises Refused where its storage is damaged or smaller than the tensor says.
        """
        storage = tensor.storage
        code = STORAGES[storage.kind]
        if code is None:
            raise Refused(f"a tensor of {storage.kind} is not read")
        kind = np.dtype(code).newbyteorder(self._order)
        reach = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True))
        empty = 0 in tensor.shape
        # Strides of zero would show few elements as very many.
        many = int(np.prod([float(n) for n in tensor.shape]))
        if not empty and (reach >= storage.elements or many > storage.elements):
            raise Refused("a tensor reaches beyond its storage")
        if empty:
            return np.empty(tensor.shape, kind)
        data = self._read(f"{self._name}/data/{storage.key}", storage.elements * kind.itemsize)
        if len(data) != storage.elements * kind.itemsize:
            raise Refused("a storage has another size than the pickle says")
        strides = [stride * kind.itemsize for stride in tensor.stride]
        return np.ndarray(tensor.shape, kind, data, tensor.offset * kind.itemsize, strides)

    def _byte_order(self) -> Literal["<", ">"]:
        """`<` or `>`; archives of torch before 2.1 do not say, and are little-endian."""
        name = f"{self._name}/byteorder"
        if name not in self._zip.NameToInfo:
            return "<"
        order = self._read(name, 16)
        if order not in (b"little", b"big"):
            raise Refused("its byte order is neither little nor big")
        return "<" if order == b"little" else ">"

    def _read(self, name: str, most: int) -> bytes:
        """The content of an entry, which torch never compresses: so it is at most as long as the file."""
        entry = self._zip.NameToInfo.get(name)
        if entry is None:
            raise Refused("a storage is missing from the archive")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise Refused("an entry is compressed or encrypted, as torch.save never does")
        if entry.file_size != entry.compress_size or entry.file_size > min(most, self._size):
            raise Refused(f"an entry is larger than the {min(most, self._size):,} bytes it may have")
        try:
            return self._zip.read(entry)
        except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, zlib.error) as error:
            raise Refused("an entry is damaged or ends early") from error


def _look_through(content: bytes) -> None:
    """Refuse a pickle that does more than build plain data, before any of it is built."""
    operations = 0
    try:
        for operation, argument, _ in pickletools.genops(content):
            operations += 1
            if operation.name not in _PLAIN:
                raise Refused(f"its pickle uses {operation.name}, which plain data does not need")
            # The reader makes room for all positions up to the one a pickle names.
            if operation.name in ("BINPUT", "LONG_BINPUT") and int(argument or 0) > operations:
                raise Refused("its pickle refers to objects it does not have")
            if operations > MOST_OPERATIONS:
                raise Refused(f"its pickle has more than {MOST_OPERATIONS:,} operations")
    except (ValueError, IndexError, EOFError, OverflowError) as error:
        raise Refused("its pickle is damaged or ends early") from error


def _load(content: bytes) -> Any:
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except _WRONG as error:
        raise Refused("its pickle is damaged or ends early") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if module == "torch" and name in STORAGES:
            return _Kind(name)
        shown = _UNPRINTABLE.sub("?", f"{module}.{name}")[:80]
        raise Refused(f"its pickle names {shown}, which only code could build: it is not read")

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", _Kind(kind), str(key), str(), int(elements)) if _KEY.fullmatch(key):
                if elements >= 0:
                    return _Storage(key, kind, elements)
        raise Refused("a storage is described in a way that torch does not")


@dataclass(frozen=True)
class _Kind:
    name: str


def _rebuild(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    """In the place of torch's function of this name; gradients and hooks are of no interest."""
    numbers = isinstance(shape, tuple) and isinstance(stride, tuple) and len(shape) == len(stride)
    if not isinstance(storage, _Storage) or not numbers or len(shape) > MOST_DIMENSIONS:
        raise Refused("a tensor is described in a way that torch does not")
    if not all(type(n) is int and 0 <= n < 1 << 48 for n in (offset, *shape, *stride)):
        raise Refused("a tensor has a negative or an impossible size")
    return Tensor(storage, offset, shape, stride)
