"""Anonymous memory that another process on the host can be handed by descriptor. It has no name in any file
system, so nothing can outlive the processes that hold it, however they die."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

from shared.protocol.errors import TooLarge

TOUCH_STRIDE_BYTES = 64 << 20
SPARE_BYTES = 256 << 20
"""Kept free for everything else on the host when a size is judged."""

Progress = Callable[[int, int], None]
"""Called with (bytes touched, bytes in all) after every stride."""

_CGROUP_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def available_bytes() -> int | None:
    """What the host, or the container's limit, still has to give. None where the system does not say."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    for limit_file, used_file in _CGROUP_LIMITS:
        try:
            limit = limit_file.read_text().strip()
            if limit != "max":
                found.append(max(0, int(limit) - int(used_file.read_text())))
        except (OSError, ValueError):
            continue
    return min(found, default=None)


class Memory:
    """`size_bytes` of zeroed memory, all of it touched before the constructor returns: a first touch later
    would cost more than the copy it serves, and running out would be a SIGBUS instead of the TooLarge raised
    here."""

    def __init__(self, size_bytes: int, progress: Progress | None = None, name: str = "tsukimi") -> None:
        if size_bytes <= 0:
            raise TooLarge(f"memory of {size_bytes} bytes asked for: it must be positive")
        room = available_bytes()
        if room is not None and size_bytes > room - SPARE_BYTES:
            raise TooLarge(
                f"{size_bytes} bytes of memory asked for, but only {room} are available on this host "
                f"({SPARE_BYTES} of them are kept in reserve)"
            )
        self.size_bytes = size_bytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, size_bytes)
            self._map = mmap.mmap(self.fd, size_bytes)
        except OSError as e:
            os.close(self.fd)
            raise TooLarge(f"the system refused {size_bytes} bytes of memory: {e}") from e
        self.view = memoryview(self._map)
        self._closed = False
        self._touch(progress)

    def _touch(self, progress: Progress | None) -> None:
        zeros = bytes(min(TOUCH_STRIDE_BYTES, self.size_bytes))
        for start in range(0, self.size_bytes, TOUCH_STRIDE_BYTES):
            end = min(start + TOUCH_STRIDE_BYTES, self.size_bytes)
            self.view[start:end] = zeros[: end - start]
            if progress is not None:
                progress(end, self.size_bytes)

    def read_only_fd(self) -> int:
        """A new descriptor through which the memory can be read and not written. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give the memory back. Idempotent. Where views of it are still held (a tensor over it, say), the
        mapping lives exactly as long as they do."""
        if self._closed:
            return
        self._closed = True
        os.close(self.fd)
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass


class MappedMemory(Memory):
    """Memory that another process allocated and touched, by a descriptor that belongs to this one from now on."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = fd
        self._map = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.view = memoryview(self._map)
        self._closed = False
