"""The image, built and run for real, without a daemon.

    python -m campaigns.image --work FOLDER [--python-image IMAGE] [--wheels FOLDER] [--pass WORDS]

Builds the Dockerfile for a CPU with buildah (chroot isolation, vfs storage), prints the size of each layer,
starts the image's own command as a user id that nobody has given it, on a root that cannot be written, and
asks it what the README asks. Without --python-image the base is made with debootstrap. Needs root, Linux, and
some 20 GB in FOLDER.

    --wheels FOLDER   wheels that the build may use, PyTorch's CPU build above all
    --pass WORDS      added to `buildah build`: --build-arg TORCH_INDEX_URL=..., --volume ...

Owns: the build, the table of layers, the start and the question.
Never: pushes, or leaves a mount behind.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from campaigns.servers.free_ports import free_port
from campaigns.servers.running import ROOT

_BASE = "localhost/tokenyard-base"
_IMAGE = "localhost/tokenyard:cpu"
_SOME_USER = 34567
_READY_WITHIN_S = 180.0
_MOUNTS = """
mount --bind {root} {root} && mount -o remount,bind,ro {root} &&
mount -t tmpfs -o mode=1777 tmpfs {root}/tmp && mount -t proc proc {root}/proc &&
mount -t tmpfs tmpfs {root}/dev && for each in null zero random urandom; do
touch {root}/dev/$each && mount --bind /dev/$each {root}/dev/$each || exit 1; done &&
if touch {root}/is-writable 2>/dev/null; then echo "the root can be written" >&2; exit 1; fi &&
exec {command}
"""


class Buildah:
    """The command, with storage of its own."""

    def __init__(self, work: Path) -> None:
        self.storage = work / "storage"
        self._options = (
            "--root",
            str(self.storage),
            "--runroot",
            str(work / "run"),
            "--storage-driver",
            "vfs",
        )

    def __call__(self, *words: str) -> str:
        """Run; return the output. Raises subprocess.CalledProcessError."""
        return subprocess.run(
            ["buildah", *self._options, *words], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT
        ).stdout.strip()


def make_base(buildah: Buildah, work: Path, mirror: str) -> str:
    """Make a Debian with Python in a folder, and an image of it."""
    folder = work / "base"
    if not (folder / "usr/bin/python3").exists():
        packages = "python3,python3-venv,ca-certificates"
        command = ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(folder)]
        command += [mirror] if mirror else []
        subprocess.run(command, check=True)
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(folder), "/")
    buildah("config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", container)
    buildah("commit", "--quiet", "--rm", container, _BASE)
    return _BASE


def layers(buildah: Buildah) -> list[tuple[int, str]]:
    """Bytes of each layer, and what made it."""
    image: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", _IMAGE))["OCIv1"]
    stored = json.loads((buildah.storage / "vfs-layers" / "layers.json").read_text())
    sizes = {each.get("diff-digest"): each.get("diff-size", 0) for each in stored}
    made_by = [each.get("created_by", "") for each in image["history"] if not each.get("empty_layer")]
    return [
        (sizes.get(digest, 0), words)
        for digest, words in zip(image["rootfs"]["diff_ids"], made_by, strict=True)
    ]


@contextlib.contextmanager
def started(buildah: Buildah, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The image's entry point, in a mount namespace that ends with it."""
    container = buildah("from", _IMAGE)
    try:
        root = buildah("mount", container)
        config: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", _IMAGE))["OCIv1"]["config"]
        environment = [*config["Env"], f"TOKENYARD_PORT={port}", "TOKENYARD_ALLOW_UNAUTHENTICATED=true"]
        words = [
            "chroot",
            f"--userspec={_SOME_USER}:0",
            root,
            "env",
            "-i",
            *environment,
            *config["Entrypoint"],
        ]
        script = _MOUNTS.format(root=shlex.quote(root), command=shlex.join(words))
        process = subprocess.Popen(["unshare", "--mount", "sh", "-c", script], start_new_session=True)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)
    finally:
        buildah("umount", container)
        buildah("rm", container)


def question_of_the_readme(port: int) -> list[str]:
    """Its curl, with our port."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^curl (?:.*\\\n)*.*$", page, re.MULTILINE)
    assert found, "the README asks with curl"
    return shlex.split(found[0].replace("\\\n", " ").replace(":8000", f":{port}"))


def ask(port: int, process: "subprocess.Popen[bytes]") -> str:
    """Wait until it is ready, then ask. Raises RuntimeError."""
    ready = ["curl", "--silent", "--fail", "--output", os.devnull, f"http://127.0.0.1:{port}/health/ready"]
    began_s = time.monotonic()
    while subprocess.run(ready, check=False).returncode:
        if process.poll() is not None or time.monotonic() - began_s > _READY_WITHIN_S:
            raise RuntimeError(f"not ready after {time.monotonic() - began_s:.0f} s")
        time.sleep(1)
    print(f"ready after {time.monotonic() - began_s:.0f} s as user {_SOME_USER} on a root that is read-only")
    reply = subprocess.run(
        [*question_of_the_readme(port), "--silent"], check=True, capture_output=True, text=True
    )
    return str(json.loads(reply.stdout)["choices"][0]["message"]["content"])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.image", allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "tokenyard-image")
    parser.add_argument("--python-image", default="", metavar="IMAGE")
    parser.add_argument("--mirror", default="", metavar="URL", help="where debootstrap finds Debian")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER")
    parser.add_argument("--pass", dest="words", default="", metavar="WORDS")
    options = parser.parse_args(arguments)
    if os.geteuid() != 0:
        parser.error("mounts need root")
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    buildah = Buildah(work)
    base = options.python_image or make_base(buildah, work, options.mirror)
    with_wheels = (
        (
            "--volume",
            f"{options.wheels.resolve()}:/wheelhouse:ro",
            "--build-arg",
            "PIP_FIND_LINKS=/wheelhouse",
        )
        if options.wheels
        else ()
    )
    # The format of Docker has a HEALTHCHECK, which that of OCI has not.
    words = ("--isolation", "chroot", "--format", "docker", *with_wheels)
    words += ("--build-arg", f"PYTHON_IMAGE={base}")
    if "@sha256:" not in base:
        words += ("--build-arg", "BASE_WITHOUT_DIGEST=yes")
    began_s = time.monotonic()
    buildah("build", "--quiet", *words, *shlex.split(options.words), "--tag", _IMAGE, ".")
    print(f"built in {time.monotonic() - began_s:.0f} s")
    sizes = layers(buildah)
    for num_bytes, made_by in sizes:
        print(f"{num_bytes / 1e6:9.1f} MB  {made_by[:90]}")
    print(f"{sum(num_bytes for num_bytes, _ in sizes) / 1e6:9.1f} MB  in all")
    port = free_port()
    with started(buildah, port) as process:
        print(f"it answers: {ask(port, process)!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
