"""Check manifests against the official schemas; runs in .venv-ecosystem-kubernetes.

Reads {"versions": ["1.37"], "manifests": [...]} as JSON on stdin and prints what is wrong, a line each. Unknown fields are wrong, and so
are unknown kinds.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

from kubernetes_validate import utils

# It reads a file of a megabyte for each manifest.
utils.schema_contents = functools.cache(utils.schema_contents)


def problem(manifest: dict[str, Any], version: str) -> str:
    """Return what is wrong with a manifest; empty if nothing is."""
    try:
        utils.validate(manifest, version, strict=True)
    except utils.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    except utils.SchemaNotFoundError as error:
        return str(error.message)
    return ""


asked = json.load(sys.stdin)
wrong = 0
for version in asked["versions"]:
    for manifest in asked["manifests"]:
        if found := problem(manifest, version):
            wrong += 1
            print(f"{version}: {manifest['kind']} {manifest['metadata']['name']}: {found}")
sys.exit(bool(wrong))
