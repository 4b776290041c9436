"""Who may talk to a listener: anybody who reaches it, or who has the bearer token; in the clear or by TLS."""

from __future__ import annotations

import hmac
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tailscope.errors import UsageError
from tailscope.live.settings import Serve

if TYPE_CHECKING:
    import grpc


@dataclass(frozen=True)
class Access:
    token: str | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def allows(self, authorization: str | bytes | None) -> bool:
        """Whether a request with this header, or none, may come in."""
        if self.token is None:
            return True
        given = authorization or b""
        if isinstance(given, str):
            given = given.encode("utf-8", "surrogateescape")  # as headers are decoded
        return hmac.compare_digest(given, f"Bearer {self.token}".encode())

    def ssl_context(self) -> ssl.SSLContext | None:
        """Raises UsageError."""
        if self.cert_file is None or self.key_file is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # Without a password at hand, an encrypted key would ask for it on the terminal.
            context.load_cert_chain(self.cert_file, self.key_file, password="")
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"{self.cert_file}, {self.key_file}: no certificate and key: {error}") from error
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials | None:
        if self.cert_file is None or self.key_file is None:
            return None
        import grpc  # which `tail` and the scraper have no use for

        return grpc.ssl_server_credentials([(self.key_file.read_bytes(), self.cert_file.read_bytes())])


def access_of(serve: Serve) -> Access:
    """Raises UsageError for a token or a certificate that cannot be read, of scrapes as well."""
    token = None if serve.bearer_token_file is None else read_token(serve.bearer_token_file)
    access = Access(token, serve.tls_cert_file, serve.tls_key_file)
    access.ssl_context()
    for scrape in serve.scrapes:
        if scrape.bearer_token_file is not None:
            read_token(scrape.bearer_token_file)
        if scrape.ca_file is not None:
            ca_context(scrape.ca_file)
    return access


def ca_context(path: Path) -> ssl.SSLContext:
    """Trusts the certificates of a file alone. Raises UsageError."""
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"{path}: no certificates: {error}") from error


def read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot read the bearer token: {error}") from error
    if not token or not token.isprintable() or not token.isascii() or " " in token:
        raise UsageError(f"{path}: must hold one bearer token")
    return token
