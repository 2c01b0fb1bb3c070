"""The emulated machine: Debian's kernel on a processor made of software, and the lines that its guest writes.

Owns: the kernel's package, the command of QEMU, its process and its time.
Never: asks for a virtual machine of the host's kernel, or gives the guest a network.

The guest's clock counts its instructions (QEMU, `-icount`), so that neither a busy host nor an emulator that
is stopped for a while is seen in it: time limits inside mean there what they mean on a machine of its own.
"""

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

_KERNEL_PACKAGE = "linux-image-cloud-amd64"
_NS_PER_INSTRUCTION_LOG2 = 0
_MEMORY = "3G"
_KILLED_WITHIN_S = 10.0


def fetch_kernel(work: Path) -> Path:
    """Unpack Debian's kernel into a folder, from the apt sources of this machine; nothing is installed."""
    found = sorted(work.glob("kernel/boot/vmlinuz-*"))
    if found:
        return found[-1]
    depends = subprocess.run(
        ["apt-cache", "depends", _KERNEL_PACKAGE], check=True, stdout=subprocess.PIPE, text=True
    )
    name = re.search(r"Depends: (linux-image-\S+)", depends.stdout)
    if name is None:
        raise SystemExit(f"no {_KERNEL_PACKAGE} in the apt sources (apt-get update?): name one with --kernel")
    subprocess.run(["apt-get", "download", "-q", name[1]], check=True, cwd=work)
    package = max(work.glob(f"{name[1]}_*.deb"))
    subprocess.run(["dpkg-deb", "--extract", str(package), str(work / "kernel")], check=True)
    return max(work.glob("kernel/boot/vmlinuz-*"))


def command(kernel: Path, image: Path, log: Path, words: Sequence[str]) -> list[str]:
    """Build the command; `words` reach the guest's init."""
    return [
        "qemu-system-x86_64",
        *("-accel", "tcg", "-icount", f"shift={_NS_PER_INSTRUCTION_LOG2}", "-cpu", "max", "-m", _MEMORY),
        *("-nodefaults", "-no-user-config", "-display", "none", "-nic", "none", "-no-reboot"),
        *("-drive", f"if=none,id=root,file={image},format=raw,readonly=on"),
        *("-device", "nvme,drive=root,serial=root"),
        *("-serial", "stdio", "-serial", f"file:{log}"),
        *("-kernel", str(kernel), "-append"),
        "console=ttyS1 root=/dev/nvme0n1 rootfstype=ext4 ro panic=-1 init=/init -- " + " ".join(words),
    ]


def lines_of(words: Sequence[str]) -> Iterator[str]:
    """Run the emulator; yield what the guest writes until its machine ends."""
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            yield line.rstrip()
        if process.wait():
            yield f"FAULT the emulator ended with code {process.returncode}"
    finally:
        process.kill()  # nothing happens if it has ended
        process.wait(_KILLED_WITHIN_S)
