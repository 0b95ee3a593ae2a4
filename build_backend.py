"""setuptools as the build backend, with one addition: an editable install that type checkers find.

The packages lie in two folders, so setuptools installs an import hook, which mypy and pyright do not run. `build_editable` also
installs a .pth file that names the folders: plain paths, which both read.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - all hooks of PEP 517 and PEP 660

FOLDERS = ("registry", "cli")
NAME = "llama_ckpt_folders.pth"


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """The editable wheel of setuptools with the .pth file added; gives its file name (PEP 660)."""
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    wheel = Path(wheel_directory) / name
    root = Path(__file__).resolve().parent
    content = "".join(f"{root / folder}\n" for folder in FOLDERS).encode()
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    record = next(path for path in files if path.endswith(".dist-info/RECORD"))
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    files[record] += f"{NAME},sha256={digest},{len(content)}\n".encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in {NAME: content, **files}.items():
            archive.writestr(path, data)
    return name
