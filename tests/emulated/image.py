"""Makes a CD image that boots a Linux kernel into one program, with the few files that it needs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

_DIRECTORY, _DEVICE, _PROGRAM = 0o040755, 0o020600, 0o100755


def write_cd(image: Path, packages: Path, init: Path, files: Iterable[Path], kernel_words: str) -> None:
    """Write the CD image. `packages` is a folder with Debian's packages of a kernel, isolinux, syslinux and genisoimage,
    unpacked. `init` is the program of the first process. Each of `files` has the same path on the CD's file system as
    here."""
    folder = image.parent / "cd"
    folder.mkdir(exist_ok=True)
    (kernel,) = packages.glob("boot/vmlinuz-*")
    shutil.copy(kernel, folder / "vmlinuz")
    for name in ("ISOLINUX/isolinux.bin", "syslinux/modules/bios/ldlinux.c32"):
        shutil.copy(packages / "usr/lib" / name, folder)
    (folder / "isolinux.cfg").write_text(
        f"default linux\nlabel linux\n kernel vmlinuz\n append initrd=initrd {kernel_words}\n"
    )
    (folder / "initrd").write_bytes(_archive(init, files))
    subprocess.run(
        [
            str(packages / "usr/bin/genisoimage"), "-quiet", "-o", str(image), "-b", "isolinux.bin", "-c", "boot.cat",
            "-no-emul-boot", "-boot-load-size", "4", "-boot-info-table", str(folder),
        ],
        check=True,
    )  # fmt: skip


def _archive(init: Path, files: Iterable[Path]) -> bytes:
    """The initrd: a cpio archive in format `newc`, which the kernel unpacks into its first file system."""
    entries = {"dev": _entry("dev", _DIRECTORY), "dev/console": _entry("dev/console", _DEVICE, device=(5, 1))}
    for file in files:
        name = file.relative_to("/")
        for parent in reversed(name.parents[:-1]):
            entries[str(parent)] = _entry(str(parent), _DIRECTORY)
        entries[str(name)] = _entry(str(name), _PROGRAM, file.read_bytes())
    entries["init"] = _entry("init", _PROGRAM, init.read_bytes())
    return b"".join(entries.values()) + _entry("TRAILER!!!", 0)


def _entry(name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0)
    header = "070701" + "".join(f"{field:08X}" for field in fields)
    return _padded(header.encode() + name.encode() + b"\0") + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
