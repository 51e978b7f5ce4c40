"""The certificate that a gateway makes for itself."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

from mqmesh.certificates import ServerCertificate
from mqmesh.cli.processes.gateway import with_own_certificate
from mqmesh.roles.gateway.config import SHARED_LOCK, GatewayConfig
from mqmesh.storage.files.directory_lock import hold_file


def test_a_certificate_is_made_once_and_used_again(tmp_path):
    config = GatewayConfig(store_path_root_dir=str(tmp_path / "data"))
    made = with_own_certificate(config)
    ServerCertificate(made.tls_cert_file, made.tls_key_file)
    key = Path(made.tls_key_file)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    before = key.read_bytes()
    assert with_own_certificate(config) == made
    assert key.read_bytes() == before


def test_another_worker_can_change_what_they_share_meanwhile(tmp_path, monkeypatch):
    def run(arguments: list[str], **options: object) -> None:
        with hold_file(tmp_path / SHARED_LOCK, wait=False):
            (tmp_path / "own-key.pem").write_text("the other's")
            (tmp_path / "own-cert.pem").write_text("the other's")

    monkeypatch.setattr(subprocess, "run", run)
    made = with_own_certificate(GatewayConfig(store_path_root_dir=str(tmp_path)))
    assert Path(made.tls_key_file).read_text() == "the other's"
    assert {path.name for path in tmp_path.iterdir()} == {
        *("own-cert.pem", "own-key.pem", SHARED_LOCK)
    }


def test_one_that_is_named_is_taken(tmp_path):
    named = GatewayConfig(
        store_path_root_dir=str(tmp_path / "data"), tls_cert_file="c", tls_key_file="k"
    )
    assert with_own_certificate(named) == named
    assert not (tmp_path / "data").exists()


def test_without_openssl_there_is_none(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    config = GatewayConfig(store_path_root_dir=str(tmp_path / "data"))
    assert with_own_certificate(config) == config
    assert "TLS is not served" in caplog.text
