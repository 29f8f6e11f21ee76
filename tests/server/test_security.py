"""Who is let in, and what those hear who are not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.flight as flight
import pytest
from dataset_support import Counting
from server_support import Authority, Share, authority, lines, pages_of, whole, write_lines

from penstock.errors import ConfigError, ServerAuthError, ServerTLSError, ServerUnavailableError
from penstock.manifest import Manifest
from penstock.server import TLS, Client, Server
from penstock.server.auth import check_exposure
from penstock.server.protocol import encode_key

__all__ = ["authority"]  # a fixture


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return Manifest.open(write_lines(tmp_path_factory.mktemp("data") / "train.txt", 50_000))


def works(client: Client) -> None:
    part = whole(client, end=1000)
    assert len(lines(pages_of(client, part))) == 1000
    assert client.rows("train", part.fingerprint, [7]).num_rows == 1


class TestToken:
    def test_right(self, manifest: Manifest, tmp_path: Path) -> None:
        (tmp_path / "token").write_text("s3cret\n")
        with Server({"train": manifest}, token="s3cret") as server:
            works(Client(server.address, token="s3cret"))
            works(Client(server.address, token_file=tmp_path / "token"))

    @pytest.mark.parametrize("token", ["wrong", "s3cre", "s3cret2", "S3CRET", None])
    def test_wrong(self, manifest: Manifest, token: str | None) -> None:
        seen = Counting()
        with Server({"train": manifest}, token="s3cret", observer=seen) as server:
            client = Client(server.address, token=token)
            part = Share(name="train", fingerprint=manifest.fingerprint, samples=len(manifest))
            message = "the token is wrong" if token else "asks for a token, and none was given"
            calls: list[Any] = [
                client.list,
                client.info,
                client.manifest,
                lambda: next(pages_of(client, part)),
                lambda: client.rows("train", manifest.fingerprint, [1]),
            ]
            for call in calls:
                with pytest.raises(ServerAuthError, match=f"grpc://127.*: .*{message}"):
                    call()
            assert message in client.health()[server.address]
            assert set(seen.errors) == {"ServerAuthError"}
            assert seen.streams == 0

    def test_a_file_is_read_anew(self, manifest: Manifest, tmp_path: Path) -> None:
        file = tmp_path / "token"
        file.write_text("old")
        with Server({"train": manifest}, token="new") as server:
            client = Client(server.address, token_file=file)
            with pytest.raises(ServerAuthError):
                client.info()
            file.write_text("new")
            works(client)

    def test_odd_headers(self, manifest: Manifest) -> None:
        with Server({"train": manifest}, token="s3cret") as server, flight.connect(server.address) as plain:
            train = flight.FlightDescriptor.for_command(encode_key("train", None))
            odd: list[list[tuple[bytes, bytes]]] = [
                [(b"authorization", b"Bearer s3cret"), (b"authorization", b"Bearer s3cret")],
                [(b"authorization", b"Basic s3cret")],
                [(b"authorization", b"")],
                [(b"x-token", b"s3cret")],
                [],
            ]
            for headers in odd:
                with pytest.raises(flight.FlightUnauthenticatedError):
                    plain.get_flight_info(train, flight.FlightCallOptions(headers=headers))
            options = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer s3cret")])
            assert plain.get_flight_info(train, options).total_records == len(manifest)

    @pytest.mark.parametrize("token", ["", "a b", "a\n", "ü"])
    def test_tokens_that_cannot_travel(self, manifest: Manifest, token: str) -> None:
        with pytest.raises(ConfigError, match="visible ASCII"):
            Server({"train": manifest}, token=token)


class TestExposure:
    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
    def test_strangers(self, manifest: Manifest, host: str) -> None:
        with pytest.raises(ConfigError, match=r"anyone who reaches .* pass a token, or insecure=True"):
            Server({"train": manifest}, host=host)

    def test_allowed(self) -> None:
        for host in ("127.0.0.1", "127.3.4.5", "::1", "localhost"):
            check_exposure(host, None, None, False)
        check_exposure("0.0.0.0", "token", None, False)
        check_exposure("0.0.0.0", None, None, True)
        check_exposure("0.0.0.0", None, TLS("a", "b", client_roots="c"), False)
        with pytest.raises(ConfigError):
            check_exposure("0.0.0.0", None, TLS("a", "b"), False)

    def test_everywhere_with_a_token(self, manifest: Manifest) -> None:
        with Server({"train": manifest}, host="0.0.0.0", token="t") as server:
            works(Client(server.address.replace("0.0.0.0", "127.0.0.1"), token="t"))


class TestTLS:
    @pytest.fixture(scope="class")
    @classmethod
    def secure(cls, manifest: Manifest, authority: Authority) -> Iterator[Server]:
        with Server({"train": manifest}, tls=TLS(*authority.certificate("server")), token="t") as server:
            yield server

    def test_works(self, secure: Server, authority: Authority) -> None:
        assert secure.address.startswith("grpc+tls://")
        works(Client(secure.address, tls_roots=authority.roots, token="t"))

    def test_wrong_token(self, secure: Server, authority: Authority) -> None:
        with pytest.raises(ServerAuthError, match="token is wrong"):
            Client(secure.address, tls_roots=authority.roots, token="x").info()

    def test_unknown_authority(self, secure: Server) -> None:
        with pytest.raises(ServerTLSError, match=r"certificate of grpc.tls://.* is not accepted: .*issuer"):
            Client(secure.address, token="t", timeout=2).info()

    def test_a_plain_client(self, secure: Server) -> None:
        with pytest.raises(ServerTLSError, match=r"speaks TLS: use grpc\+tls://"):
            Client(secure.address.replace("grpc+tls", "grpc"), token="t", timeout=2).info()

    def test_a_plain_server(self, manifest: Manifest, authority: Authority) -> None:
        with Server({"train": manifest}) as server:
            client = Client(server.address.replace("grpc", "grpc+tls"), tls_roots=authority.roots, timeout=2)
            with pytest.raises(ServerTLSError, match="does not speak TLS: use grpc://"):
                client.info()

    def test_an_expired_certificate(self, manifest: Manifest, authority: Authority) -> None:
        tls = TLS(*authority.certificate("old", expired=True))
        with (
            Server({"train": manifest}, tls=tls) as server,
            pytest.raises(ServerTLSError, match="not accepted: certificate has expired"),
        ):
            Client(server.address, tls_roots=authority.roots, timeout=2).info()

    def test_a_certificate_for_another_host(self, manifest: Manifest, authority: Authority) -> None:
        tls = TLS(*authority.certificate("other", host="DNS:example.org"))
        with (
            Server({"train": manifest}, tls=tls) as server,
            pytest.raises(ServerTLSError, match="not accepted: IP address mismatch"),
        ):
            Client(server.address, tls_roots=authority.roots, timeout=2).info()

    def test_mutual(self, manifest: Manifest, authority: Authority, tmp_path: Path) -> None:
        cert, key = authority.certificate("client")
        tls = TLS(*authority.certificate("mutual"), client_roots=authority.roots)
        with Server({"train": manifest}, tls=tls) as server:
            works(Client(server.address, tls_roots=authority.roots, tls_cert=cert, tls_key=key))
            with pytest.raises(ServerTLSError, match="hangs up on this client: it wants a certificate"):
                Client(server.address, tls_roots=authority.roots, timeout=2).info()
            strange = Authority(tmp_path)
            cert, key = strange.certificate("stranger")
            with pytest.raises(ServerTLSError, match="of an authority that it knows"):
                Client(server.address, tls_roots=authority.roots, tls_cert=cert, tls_key=key, timeout=2).info()

    def test_files_that_are_wrong(self, manifest: Manifest, authority: Authority, tmp_path: Path) -> None:
        cert, key = authority.certificate("one")
        _, other = authority.certificate("two")
        (tmp_path / "junk.pem").write_text("junk")
        for tls, message in [
            (TLS(cert, other), "not a certificate and its key"),
            (TLS(tmp_path / "none.pem", key), "tls cert: cannot read"),
            (TLS(cert, tmp_path / "junk.pem"), "tls key: .* not in PEM format"),
            (TLS(cert, key, client_roots=tmp_path / "junk.pem"), "tls client roots: .* not in PEM format"),
        ]:
            with pytest.raises(ConfigError, match=message):
                Server({"train": manifest}, tls=tls)
        with pytest.raises(ConfigError, match="tls_root_certs: cannot read"):
            Client("grpc+tls://127.0.0.1:1", tls_roots=tmp_path / "none.pem")
        with pytest.raises(ConfigError, match="certificates cannot be used"):
            Client("grpc+tls://127.0.0.1:1", tls_roots=authority.roots, tls_cert=cert, tls_key=other)

    def test_renewed_roots_are_read_anew(self, manifest: Manifest, authority: Authority, tmp_path: Path) -> None:
        roots = tmp_path / "roots.pem"
        roots.write_bytes(authority.certificate("unrelated")[0].read_bytes())
        with Server({"train": manifest}, tls=TLS(*authority.certificate("again"))) as server:
            client = Client(server.address, tls_roots=roots, timeout=2)
            with pytest.raises(ServerTLSError):
                client.info()
            roots.write_bytes(authority.roots.read_bytes())
            works(client)


def test_garbage_on_the_port_harms_nobody(manifest: Manifest) -> None:
    import socket

    with Server({"train": manifest}) as server:
        port = int(server.address.rpartition(":")[2])

        def shout(data: bytes) -> None:
            with socket.create_connection(("127.0.0.1", port), 5) as plain:
                plain.sendall(data)
                plain.settimeout(0.2)
                with suppress(OSError):
                    plain.recv(100)

        garbage = [
            b"GET / HTTP/1.1\r\n\r\n",
            bytes(range(256)) * 100,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500,
            b"",
        ]
        threads = [threading.Thread(target=shout, args=(data,)) for data in garbage * 5]
        for thread in threads:
            thread.start()
        works(Client(server.address))
        for thread in threads:
            thread.join()
        works(Client(server.address))


def test_nobody_is_not_a_matter_of_tls(authority: Authority) -> None:
    with pytest.raises(ServerUnavailableError, match="refused"):
        Client("grpc+tls://127.0.0.1:9", tls_roots=authority.roots, timeout=0.2).info()
