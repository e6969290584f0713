"""Runs the kernels' AVX-512 libraries in Bochs, an emulator of PCs, as a CPU with AVX-512 and its bf16 products:

    python -m tests.emulated FOLDER BOCHS_SOURCE [BUILD...]

The README.md in this folder lists the requirements.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from shared.engine.native.build import BUILDS, library
from tests.emulated.image import write_cd
from tests.emulated.program import build_check

BUILD_NAMES = ("avx512", "avx512_bf16")
MOST_MINUTES = 40
_CONFIGURE = (
    "--enable-cpu-level=6", "--enable-x86-64", "--enable-avx", "--enable-evex", "--enable-all-optimizations",
    "--with-nogui", "--disable-docbook", "--disable-plugins",
)  # fmt: skip
_KERNEL_WORDS = (
    "console=ttyS0 quiet panic=-1 mitigations=off "
    "clearcpuid=580 "  # FSRM: the kernel's memmove relies on ERMS when it sees FSRM, and Bochs announces FSRM only
    "-- "
)
_MACHINE = """\
megs: 256
cpu: model=sapphire_rapids, ips=50000000, reset_on_triple_fault=0, ignore_bad_msrs=1, cpuid_freq=ips
romimage: file={source}/bios/BIOS-bochs-latest
vgaromimage: file={source}/bios/VGABIOS-lgpl/VGABIOS-lgpl-latest.bin
ata0: enabled=1
ata0-master: type=cdrom, path={image}, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={serial}
display_library: nogui
log: {log}
panic: action=fatal
"""


def main(folder: Path, source: Path, names: tuple[str, ...]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    bochs = _bochs(folder / "bochs", source)
    packages = _packages(folder / "packages")
    libraries = [library(build) for build in BUILDS if build.name in names]
    check = build_check(folder)
    image, serial, machine = folder / "cd.iso", folder / "serial.txt", folder / "bochsrc"
    words = _KERNEL_WORDS + " ".join(str(path) for path in libraries)
    write_cd(image, packages, check, [*libraries, *_needed_by(check, *libraries)], words)
    serial.unlink(missing_ok=True)
    machine.write_text(_MACHINE.format(source=source, image=image, serial=serial, log=folder / "bochs.log"))
    started = time.monotonic()
    with (folder / "bochs.txt").open("w") as output:
        emulator = subprocess.Popen([bochs, "-q", "-f", machine], stdout=output, stderr=output)
        try:
            return _follow(emulator, serial, started + 60 * MOST_MINUTES)
        finally:
            emulator.kill()
            emulator.wait()


def _bochs(folder: Path, source: Path) -> Path:
    program = folder / "bochs"
    if not program.exists():
        folder.mkdir(exist_ok=True)
        subprocess.run([source / "configure", *_CONFIGURE], cwd=folder, stdout=subprocess.DEVNULL, check=True)
        subprocess.run(["make"], cwd=folder, stdout=subprocess.DEVNULL, check=True)
    return program


def _packages(folder: Path) -> Path:
    """A folder of unpacked Debian packages: its smallest kernel, and the tools to make a bootable CD of it."""
    if not folder.exists():
        parts = folder.with_suffix(".part")
        parts.mkdir(exist_ok=True)
        depends = subprocess.run(
            ["apt-cache", "depends", "linux-image-cloud-amd64"], capture_output=True, text=True, check=True
        )
        kernel = re.findall(r"Depends: (linux-image-\S+)", depends.stdout)[0]
        wanted = (kernel, "isolinux", "syslinux-common", "genisoimage")
        subprocess.run(["apt-get", "download", *wanted], cwd=parts, check=True, stdout=subprocess.DEVNULL)
        for package in parts.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, parts], check=True)
        parts.rename(folder)
    return folder


def _needed_by(*programs: Path) -> set[Path]:
    """The dynamic loader, and the shared libraries that it loads for these programs."""
    told = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    return {Path(path) for path in re.findall(r"(/lib\S*) \(0x", told)}


def _follow(emulator: subprocess.Popen[bytes], serial: Path, until: float) -> int:
    """Print the machine's output until it ends. Returns 0 if all comparisons passed, else 1."""
    printed = 0
    while True:
        ended = emulator.poll() is not None
        text = serial.read_text(errors="replace") if serial.exists() else ""
        sys.stdout.write(text[printed:])
        sys.stdout.flush()
        printed = len(text)
        if "ALL PASSED" in text:
            return 0
        if ended or "SOME FAILED" in text or "FAILED cannot load" in text or "Kernel panic" in text:
            return 1
        if time.monotonic() > until:
            print(f"nothing more after {MOST_MINUTES} minutes")
            return 1
        time.sleep(1)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(
        main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), tuple(sys.argv[3:]) or BUILD_NAMES)
    )
