"""Copies of tensors that notice being left."""

from __future__ import annotations

import ctypes

from torch import Tensor

POISON = 0xFF  # NaN as bf16 and fp32, -1 as an integer
PAGE, GUARD = 4096, 256 << 20  # bytes


class KernelError(RuntimeError):
    """The kernel did something that a GPU would not forgive, e.g. a divergent barrier or an access out of bounds."""


class Guarded:
    """A copy of a tensor between unmapped megabytes, its end at the very edge.

    An access past the end, or far before the start, faults. Just before the start, and in the up to 15 bytes that
    alignment leaves behind the end, lies a red zone of poison that must be intact afterwards.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.nbytes = tensor, tensor.numel() * tensor.element_size()
        room = -(-self.nbytes // 16) * 16  # vector accesses need 16-byte alignment
        self.inner = max(-(-room // PAGE), 1) * PAGE
        self.size = self.inner + 2 * GUARD
        self.base = _libc.mmap(None, self.size, 0, 0x4022, -1, 0)  # no access; private, anonymous, not reserved
        assert self.base not in (None, ctypes.c_void_p(-1).value), f"no address space for {self.size} bytes"
        assert _libc.mprotect(self.base + GUARD, self.inner, 3) == 0  # read and write
        ctypes.memset(self.base + GUARD, POISON, self.inner)
        self.address = self.base + GUARD + self.inner - room
        ctypes.memmove(self.address, tensor.data_ptr(), self.nbytes)

    def owns(self, address: int) -> bool:
        """Whether `address` lies in the copy or the unmapped memory around it."""
        return self.base <= address < self.base + self.size

    def check_and_copy_back(self, name: str) -> None:
        """Raise KernelError when a red zone was written, else update the tensor."""
        ctypes.memmove(self.tensor.data_ptr(), self.address, self.nbytes)
        start, end = self.base + GUARD, self.address + self.nbytes
        front = ctypes.string_at(start, self.address - start)
        back = ctypes.string_at(end, start + self.inner - end)
        if (front + back).strip(bytes([POISON])):
            raise KernelError(f"{name} was written outside its {self.nbytes} bytes")

    def free(self) -> None:
        """Unmap the copy."""
        _libc.munmap(self.base, self.size)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
