"""Certificates for tests of TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(folder: Path) -> dict[str, str]:
    """Makes a certificate for 127.0.0.1; returns the settings that name it."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = f"req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -keyout {key}"
    command += f" -out {cert} -days 2 -subj /CN=mqmesh -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(["openssl", *command.split()], check=True, capture_output=True)
    return {"tls_cert_file": str(cert), "tls_key_file": str(key)}
