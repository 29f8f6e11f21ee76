"""Addresses of servers: what is understood, and what a refusal says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_support import Authority
from torch.utils.data import Dataset

from penstock import RankServerDataset, ServerDataset
from penstock.compat import rank_dataset
from penstock.errors import ConfigError
from penstock.server import TLS, Client, Server
from penstock.server.address import Address, parse_address
from penstock.tools.doctor.services import server as ask


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize(
    "text, host, port, secure",
    [
        ("127.0.0.1:8815", "127.0.0.1", 8815, None),
        ("  localhost:8815\n", "localhost", 8815, None),
        ("[::1]:8815", "::1", 8815, None),
        ("data.example.org:1", "data.example.org", 1, None),
        ("grpc://a:7000", "a", 7000, False),
        ("grpc+tcp://a:7000/", "a", 7000, False),
        ("GRPC+TLS://a:65535", "a", 65535, True),
        ("grpc+tls://[fe80::1]:7000", "fe80::1", 7000, True),
    ],
)
def test_what_is_understood(text: str, host: str, port: int, secure: bool | None, tls: bool) -> None:
    address = parse_address(text, tls=tls)
    assert address == Address(host, port, tls if secure is None else secure)
    assert parse_address(str(address), tls=not tls) == address


@pytest.mark.parametrize(
    "text, reason",
    [
        ("127.0.0.1", "no port"),
        ("grpc://127.0.0.1", "no port"),
        ("a:0", "no port"),
        ("a:http", "that is no port"),
        ("a:99999", "that is no port"),
        ("::1:8815", "in brackets"),
        ("[::1:8815", "in brackets"),
        ("::1", "in brackets"),
        (":8815", "no host"),
        ("", "no host"),
        ("http://a:8815", "by http://"),
        ("ray://a:8815", "by ray://"),
        ("a:8815/train", "more in it than host and port"),
        ("a:8815?x=1", "more in it than host and port"),
        ("token@a:8815", "more in it than host and port"),
        ("/data/train.txt", "more in it than host and port"),
        ("a:8815,b:8815", "as a list"),
        ("a b:8815", "as a list"),
        (8815, "must be a str"),
        (None, "must be a str"),
        (b"a:8815", "must be a str"),
    ],
)
def test_what_is_refused(text: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"({reason}).*Write host:port, grpc://host:port or"):
        parse_address(text)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a server of three rows."""
    file = tmp_path_factory.mktemp("served") / "train.txt"
    file.write_text("a.jpg 0\nb.jpg 1\nc.jpg 2\n")
    with Server({"train": file}) as server:
        yield server.address.removeprefix("grpc://")


def test_everybody_takes_the_short_form(address: str) -> None:
    host, _, port = address.rpartition(":")
    datasets: list[Dataset[Any]] = [
        ServerDataset(address),
        ServerDataset([address, f"grpc://{address}"]),
        RankServerDataset(address, "train", rank=0, world_size=1),
        RankServerDataset([address], rank=0, world_size=1),
        rank_dataset.ServerDataset("train.txt", host, int(port)),
    ]
    assert [len(dataset) for dataset in datasets] == [3] * len(datasets)  # type: ignore[arg-type]
    with Client(address) as client:
        assert client.info("train").rows == 3
        assert str(client.addresses[0]) == f"grpc://{address}"
    found, advice = ask(address)
    assert found is not None
    assert (found.address, found.datasets, advice) == (f"grpc://{address}", {"train": 3}, [])


def test_certificates_make_it_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "train.txt").write_text("a.jpg 0\n")
    tls = TLS(*authority.certificate("server"))
    with Server({"train": tmp_path / "train.txt"}, tls=tls) as server:
        short = server.address.removeprefix("grpc+tls://")
        with Client(short, tls_roots=authority.roots) as client:
            assert client.info().rows == 1
            assert str(client.addresses[0]) == server.address
        found, _ = ask(short, tls_roots=authority.roots)
        assert found is not None
        assert (found.address, found.datasets) == (server.address, {"train": 1})
    with pytest.raises(ConfigError, match=r"grpc\+tls"):
        Client("grpc://127.0.0.1:1", tls_roots=authority.roots)


def test_what_the_diagnosis_says_of_a_wrong_address() -> None:
    found, advice = ask("http://127.0.0.1:1")
    assert found is not None
    assert found.address == "http://127.0.0.1:1"
    assert "Write host:port" in str(found.error)
    assert advice[0].failure
