"""What `torch.save` wrote, read without torch and without running anything of it.

Such a file is a zip archive that is not compressed: `NAME/data.pkl`, a pickle of plain containers whose tensors refer to
`NAME/data/KEY`, the bytes of their storages, in the order that `NAME/byteorder` says. The pickle is looked through
before it is read: only operations that build plain data are let pass, with positions and lengths that its size
allows, and with keys that are names or small numbers. Of names it may only use those in `STORAGES`, `collections.OrderedDict` and `torch._utils._rebuild_tensor_v2`,
which here is a function of ours that notes shape and strides. Numbers of a tensor are read when they are asked for.
"""

from __future__ import annotations

import io
import math
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
#: Elements of a tensor, were none of its dimensions zero.
MOST_ELEMENTS = 1 << 48
#: Objects inside each other, and numbers that are keys: recordings have some three levels, and names as keys.
MOST_DEPTH, MOST_NUMBERED = 64, 100_000
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
        #: The storage that was read last, which views of it share; the bytes that were read and given: each may be once.
        self._last: tuple[str, bytes] = ("", b"")
        self._used = 0
        self._order = self._byte_order()
        content = self._read(pickles[0], MOST_PICKLED)
        _look_through(content)
        self.root = _load(content)

    def array(self, tensor: Tensor) -> NDArray[Any]:
        """The elements of a tensor, as an array that cannot be written to.

        Raises Refused where its storage is damaged or smaller than the tensor says, and where all tensors asked for are more
        than the archive holds: then many of them share the same few bytes.
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
        if self._used > 2 * self._size:
            raise Refused("the tensors are more than the archive holds: they share the same numbers")
        if self._last[0] != storage.key:
            most = storage.elements * kind.itemsize
            self._last = (storage.key, self._read(f"{self._name}/data/{storage.key}", most))
            self._used += len(self._last[1])
        data = self._last[1]
        self._used += many * kind.itemsize
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
    shapes = _Shapes()
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
            shapes.follow(operation.name, argument)
    except (ValueError, IndexError, KeyError, EOFError, OverflowError) as error:
        raise Refused("its pickle is damaged or ends early") from error


#: In the place of an object: a text, a number below 2^31, else how many levels of objects are written in it.
_TEXT, _NUMBER = -1, -2
_PUSHED = {
    **dict.fromkeys(("BININT", "BININT1", "BININT2"), _NUMBER),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE"), _TEXT),
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "LONG1", "BINFLOAT", "GLOBAL"), 0),
    **dict.fromkeys(("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"), 0),
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MADE_OF = {"BINPERSID": 1, "REDUCE": 2, "STACK_GLOBAL": 2}


class _Shapes:
    """The stack of a pickle's reader with the kinds of the objects in the place of these: none of them is built.

    Python looks a key's parts through, one inside the other and each as often as it is named, and does so again for keys that
    seem equal: with a tuple or a large number as a key a small file can keep it busy for ever, or end it.
    """

    def __init__(self) -> None:
        self._stack: list[int] = []
        self._outer: list[list[int]] = []
        self._memo: dict[int, int] = {}
        self._numbered = 0

    def follow(self, name: str, argument: Any) -> None:
        """Raises IndexError or KeyError where the pickle takes what it does not have."""
        stack = self._stack
        if (pushed := _PUSHED.get(name)) is not None:
            stack.append(pushed)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name == "MARK":
            self._outer.append(stack)
            self._stack = []
        elif name == "TUPLE":
            self._stack = self._outer.pop()
            self._stack.append(_around(stack) if stack else 0)
        elif name in _TUPLES:
            stack.append(_around(self._popped(_TUPLES[name])))
        elif name in _MADE_OF:
            self._popped(_MADE_OF[name])
            stack.append(0)
        elif name in ("APPEND", "APPENDS"):
            self._hold(self._popped(1) if name == "APPEND" else self._marked())
        elif name in ("SETITEM", "SETITEMS"):
            pairs = self._popped(2) if name == "SETITEM" else self._marked()
            for key in pairs[::2]:
                self._check(key)
            self._hold(pairs[1::2])

    def _popped(self, count: int) -> list[int]:
        if len(self._stack) < count:
            raise IndexError("the stack is empty")
        popped = self._stack[-count:]
        del self._stack[-count:]
        return popped

    def _marked(self) -> list[int]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _hold(self, items: list[int]) -> None:
        if items:
            self._stack[-1] = max(self._stack[-1], _around(items))

    def _check(self, key: int) -> None:
        self._numbered += key == _NUMBER
        if key not in (_TEXT, _NUMBER) or self._numbered > MOST_NUMBERED:
            raise Refused(
                "its pickle has keys that are neither names nor small numbers, or very many numbers"
            )


def _around(items: list[int]) -> int:
    depth = max(0, max(items)) + 1
    if depth > MOST_DEPTH:
        raise Refused(f"its pickle has more than {MOST_DEPTH} objects inside each other")
    return depth


def _load(content: bytes) -> Any:
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except _WRONG as error:
        raise Refused("its pickle is damaged or ends early") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _ordered
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


def _ordered(*items: Any) -> OrderedDict[Any, Any]:
    """torch fills it afterwards, so that its keys are seen beforehand."""
    if items:
        raise Refused("its pickle fills a dictionary in a way that torch does not")
    return OrderedDict()


def _rebuild(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    """In the place of torch's function of this name; gradients and hooks are of no interest."""
    numbers = isinstance(shape, tuple) and isinstance(stride, tuple) and len(shape) == len(stride)
    if not isinstance(storage, _Storage) or not numbers or len(shape) > MOST_DIMENSIONS:
        raise Refused("a tensor is described in a way that torch does not")
    if not all(type(n) is int and 0 <= n < 1 << 48 for n in (offset, *shape, *stride)):
        raise Refused("a tensor has a negative or an impossible size")
    if math.prod(max(n, 1) for n in shape) > MOST_ELEMENTS:
        raise Refused("a tensor has a negative or an impossible size")
    return Tensor(storage, offset, shape, stride)
