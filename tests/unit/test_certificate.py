"""The certificate of the TLS channel, where no folder can be written."""

from __future__ import annotations

import os
import ssl
import tempfile

import pytest

from shoal.errors import LocalError
from shoal.transport.certificate import server_context


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has files in memory")
def test_no_folder_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raised FileNotFoundError: no usable temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    context, certificate = server_context()
    assert isinstance(context, ssl.SSLContext)
    assert certificate


def test_where_a_folder_is_needed_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere `ssl` can read from folders only."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    server_context()
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with pytest.raises(LocalError, match="set TMPDIR to a folder"):
        server_context()
